"""Tiny random encoder-decoders with a byte tokenizer, or for sound with a feature extractor and a folder of tones."""

from __future__ import annotations

import math
import struct
import wave
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, PreTrainedModel, WhisperFeatureExtractor

from helpers import pico

_IDS: dict[str, Any] = {
    "vocab_size": pico.VOCAB_SIZE,
    "pad_token_id": pico.EOS_ID,
    "eos_token_id": pico.EOS_ID,
    "bos_token_id": pico.EOS_ID,
    "decoder_start_token_id": 65,  # a tied random model writes it again and again
    "forced_eos_token_id": None,
    "forced_bos_token_id": None,
}
_T5: dict[str, Any] = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
_BART: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 256,
    "scale_embedding": True,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", _T5),
    "flan_t5": ("t5", {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("mt5", {**_T5, "tie_word_embeddings": False}),
    "bart": ("bart", _BART),
    "mbart": ("mbart", _BART),
    "pegasus": ("pegasus", _BART),
    "marian": ("marian", {**_BART, "encoder_layers": 3}),
    "whisper": (
        "whisper",
        {**_BART, "num_mel_bins": 16, "max_source_positions": 50, "max_target_positions": 48, "scale_embedding": False},
    ),
}


def build(kind: str) -> PreTrainedModel:
    """A random model of KINDS in float32."""
    model_type, values = KINDS[kind]
    config = transformers.AutoConfig.for_model(model_type, **{**_IDS, **values})
    opener = AutoModelForSpeechSeq2Seq if kind == "whisper" else AutoModelForSeq2SeqLM
    torch.manual_seed(0)
    model = opener.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:  # norms and biases; matrices are as transformers begins them, which T5 depends on
                parameter.add_(noise, alpha=0.1)
            elif kind in ("t5", "flan_t5", "mt5"):
                continue
            else:
                parameter.copy_(noise * parameter[0].numel() ** -0.5)
    return model


def save(kind: str, directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint of such a model."""
    pico.save(build(kind).to(dtype), directory)
    if kind == "whisper":
        WhisperFeatureExtractor(feature_size=16, chunk_length=1).save_pretrained(directory)
    return directory


def tones(folder: Path, count: int = 8, seconds: float = 1.0) -> Path:
    """Write .wav files of tones that rise, at 16,000 samples a second."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        length = int(16_000 * seconds)
        pitch = [math.sin(t * (0.02 + 0.01 * number + t * 2e-6)) for t in range(length)]
        with wave.open(str(folder / f"{number}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16_000)
            file.writeframes(struct.pack(f"<{length}h", *(int(20_000 * each) for each in pitch)))
    return folder
