"""Pico models that write no text: two blocks, hidden 128, seeded random weights, a byte tokenizer that knows pairs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from helpers.pico import EOS_ID, VOCAB_SIZE, pico_tokenizer

CLS_ID = EOS_ID + 1
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 256,
    "type_vocab_size": 2,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": EOS_ID + 2,
    "num_labels": 1,
}
_SMALL_TABLE = {"embedding_size": 64}
_RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # class -> model type, what differs from _COMMON
    "BertModel": ("bert", {}),
    "BertForSequenceClassification": ("bert", {}),
    "BertForTokenClassification": ("bert", {"num_labels": 4}),
    "BertForQuestionAnswering": ("bert", {"num_labels": 2}),
    "RobertaModel": ("roberta", {"type_vocab_size": 1}),
    "XLMRobertaForSequenceClassification": ("xlm-roberta", {"type_vocab_size": 1}),
    "CamembertModel": ("camembert", {"type_vocab_size": 1}),
    "ModernBertModel": ("modernbert", {"local_attention": 32}),
    "ModernBertForMaskedLM": ("modernbert", {"local_attention": 32}),
    "MPNetModel": ("mpnet", {}),
    "DistilBertModel": ("distilbert", {"dim": 128, "n_layers": 2, "n_heads": 4, "hidden_dim": 256}),
    "ElectraModel": ("electra", _SMALL_TABLE),
    "ElectraForPreTraining": ("electra", _SMALL_TABLE),
    "AlbertModel": ("albert", _SMALL_TABLE),
    "DebertaV2Model": ("deberta-v2", _RELATIVE),
    "DebertaV2ForSequenceClassification": ("deberta-v2", _RELATIVE),
    "NomicBertModel": ("nomic_bert", {}),
    "JinaEmbeddingsV3Model": ("jina_embeddings_v3", {}),
    "RoFormerModel": ("roformer", {}),
    "NystromformerModel": ("nystromformer", {}),
    "ConvBertModel": ("convbert", _SMALL_TABLE),
    "BigBirdModel": ("big_bird", {}),
    "Qwen3Model": ("qwen3", {"num_key_value_heads": 2, "head_dim": 32}),
    "EuroBertModel": ("eurobert", {"num_key_value_heads": 2}),
}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte; <cls> text <eos>, and <cls> text <eos> text <eos>."""
    made = pico_tokenizer()
    made.add_special_tokens({"cls_token": "<cls>", "sep_token": "<eos>", "pad_token": "<pad>", "mask_token": "<mask>"})
    ids = [("<cls>", CLS_ID), ("<eos>", EOS_ID)]
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<cls> $A <eos>", pair="<cls> $A <eos> $B:1 <eos>:1", special_tokens=ids
    )
    made.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return made


def save(name: str, directory: Path, **changes: Any) -> PreTrainedModel:
    """Write a model of CASES with its tokenizer, and return it."""
    kind, differences = CASES[name]
    config = CONFIG_MAPPING[kind](**{**_COMMON, **differences, **changes})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: PreTrainedModel = getattr(transformers, name)(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(noise, alpha=0.2)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return model
