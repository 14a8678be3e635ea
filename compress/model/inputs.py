"""Say what a model is called with: tokens, or what an encoder reads beside what its decoder reads.

A model of one stack reads token ids. An encoder-decoder has two: the encoder reads token ids or features of sound, the
decoder token ids that are its own so far. Where only tokens are at hand (a probe, a pass without data), both stacks
read them; a model of sound is given features that are made of them and mean nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, cat, equal, nn
from transformers import PreTrainedModel


class Pairs(NamedTuple):
    """Samples for a model of two stacks; `len` is that of the tuple, the number of samples is that of either part."""

    encoder: Tensor  # token ids int64 [samples, tokens], or features [samples, bins, frames]
    decoder: Tensor  # token ids int64 [samples, tokens], the first of which begins every output

    def part(self, samples: slice, device: Any) -> Pairs:
        """Return some of the samples on a device."""
        return Pairs(self.encoder[samples].to(device), self.decoder[samples].to(device))


Samples = Tensor | Pairs


def has_two_stacks(model: nn.Module) -> bool:
    """Return whether a model has an encoder whose states its decoder reads."""
    owner: Any = model
    if not isinstance(model, PreTrainedModel) or not model.config.is_encoder_decoder:
        return False
    encoder, decoder = owner.get_encoder(), owner.get_decoder()
    return encoder is not None and encoder not in (decoder, model)


def reads_sound(config: Any) -> bool:
    """Return whether the encoder of this configuration reads features of sound, not tokens."""
    return hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions")


def frames(config: Any) -> int:
    """Return the frames of sound that an encoder reads, whatever the length of the sound is."""
    return 2 * int(config.max_source_positions)


def count(samples: Samples) -> int:
    """Return the number of samples."""
    return len(samples.decoder if isinstance(samples, Pairs) else samples)


def part(samples: Samples, chosen: slice, device: Any) -> Samples:
    """Return some of the samples on a device."""
    return samples.part(chosen, device) if isinstance(samples, Pairs) else samples[chosen].to(device)


def ends(samples: Samples) -> tuple[Samples, Samples]:
    """Return the first sample and the last, or where these are the same the first one read backwards."""
    parts = samples if isinstance(samples, Pairs) else (samples,)
    pairs = [(each[:1], each[:1].flip(-1) if equal(each[:1], each[-1:]) else each[-1:]) for each in parts]
    first, last = zip(*pairs, strict=True)
    return (Pairs(*first), Pairs(*last)) if isinstance(samples, Pairs) else (first[0], last[0])


def twice(samples: Samples) -> Samples:
    """Return samples, and the same again behind them."""
    return Pairs(*(cat((each, each)) for each in samples)) if isinstance(samples, Pairs) else cat((samples, samples))


def in_type(model: Any, read: Tensor) -> Tensor:
    """Return what an encoder reads in the type that the model computes in; token ids as they are."""
    return read.to(model.dtype) if read.is_floating_point() else read


def arguments(model: Any, samples: Samples) -> dict[str, Tensor]:
    """Return the arguments of a call of the model with these samples; a model of two stacks reads tokens with both."""
    if isinstance(samples, Pairs):
        return {model.main_input_name: samples.encoder, "decoder_input_ids": samples.decoder}
    if not has_two_stacks(model):
        return {"input_ids": samples}
    if not reads_sound(model.config):
        return {model.main_input_name: samples, "decoder_input_ids": samples}
    features = _features(model.config, samples).to(model.dtype)
    return {model.main_input_name: features, "decoder_input_ids": samples[:, : model.config.max_target_positions]}


def _features(config: Any, tokens: Tensor) -> Tensor:
    """Return features [samples, bins, frames] that depend on tokens [samples, n] and stand for those of sound."""
    width = frames(config)
    repeated = tokens.repeat(1, -(-width // tokens.shape[1]))[:, None, :width]
    bins = 1 + tokens.new_ones(config.num_mel_bins).cumsum(0)
    return (0.1 * repeated * bins[:, None]).sin()
