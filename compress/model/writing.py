"""Let a model write text: tokens that begin and end one, the choice of each, and the memory that it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor

from compress.errors import CalibrationError, CheckpointError, NumericalError, shown
from compress.model.architectures import max_positions

NBYTES_PER_LOGIT = 48  # while a token is drawn: as the model gives it, in float32, and five times in float64


class Filter(NamedTuple):
    """Which tokens may be drawn: those that pass all of these, in this order, each on what is left."""

    top_k: int = 0  # the likeliest ones; 0: all
    top_p: float = 1.0  # the fewest likeliest ones that have this share of the probability
    min_p: float = 0.0  # those with at least this fraction of the likeliest one's probability

    def apply(self, probabilities: Tensor) -> Tensor:  # [batch, vocab] float64
        """Return the probabilities, not normed, with 0 for tokens that may not be drawn; the likeliest one stays."""
        if 0 < self.top_k < probabilities.shape[1]:
            least = probabilities.topk(self.top_k).values[:, -1:]
            probabilities = probabilities.where(probabilities >= least, 0.0)
        if self.top_p < 1:
            ordered, order = probabilities.sort(descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered
            ordered = ordered.where(before < self.top_p * ordered.sum(-1, keepdim=True), 0.0)
            ordered[:, 0] = probabilities.amax(-1)
            probabilities = torch.zeros_like(probabilities).scatter_(1, order, ordered)
        return probabilities.where(probabilities >= self.min_p * probabilities.amax(-1, keepdim=True), 0.0)


class Draw(LogitsProcessor):
    """Choice of each next token: the likeliest at temperature 0, else drawn with the given generator.

    generator is one for all sequences, or a list with one for each. `generate` itself draws from torch's global
    generator. So it is told to take the likeliest token, and this leaves it one to take. step, if any, is told the
    tokens that each sequence has by then. tokens: which may be drawn, by default all.
    """

    leaves_choice = False  # `generate` takes the likeliest of what is returned; True: draws by it

    def __init__(
        self,
        name: str,
        temperature: float,
        generator: torch.Generator | list[torch.Generator],
        step: Callable[[int], None] | None = None,
        tokens: Filter | None = None,
    ) -> None:
        self.name, self.temperature, self.generator, self.step = name, temperature, generator, step
        self.tokens = tokens or Filter()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # [batch, seq] int64, [batch, vocab] float32
        self._check(input_ids, scores)
        if self.step is not None:
            self.step(input_ids.shape[1] + 1)
        if self.temperature == 0:
            return scores
        cumulative = self.tokens.apply((scores.double() / self.temperature).softmax(-1)).cumsum(-1)
        uniform = self._uniform(len(scores)).to(scores.device)
        token = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).clamp_(max=scores.shape[1] - 1)
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)

    def _check(self, input_ids: Tensor, scores: Tensor) -> None:
        if not torch.isfinite(scores).all():
            raise NumericalError(
                f"{self.name} has non-finite logits at token {input_ids.shape[1]}; its weights are damaged, or overflow"
            )

    def _uniform(self, count: int) -> Tensor:  # [count, 1] float64
        if isinstance(self.generator, torch.Generator):
            return torch.rand(count, 1, dtype=torch.float64, generator=self.generator)
        return torch.stack([torch.rand(1, dtype=torch.float64, generator=own) for own in self.generator])


class Law(Draw):
    """The law of each next token, for a `custom_generate` that draws by itself, more than once for some tokens."""

    leaves_choice = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # [batch, seq] int64, [batch, vocab] float32
        self._check(input_ids, scores)
        if self.temperature == 0:
            return scores
        return self.tokens.apply((scores / self.temperature).softmax(-1)).log()


def write(
    model: transformers.PreTrainedModel, start: Tensor, new_tokens: int, draw: Draw, stop: Sequence[int] = (), **kw: Any
) -> Tensor:
    """Return start int64 [batch, seq] and up to new_tokens more, fewer only where one of the `stop` tokens came up.

    kw: goes to `generate`: past_key_values, a cache of the first tokens of `start`. The generation settings in the
    checkpoint (top_k, penalties, early stopping) do not count. Raise CalibrationError for more tokens than the model
    has positions.
    """
    if new_tokens < 1:
        return start
    draws = {"do_sample": True, "top_k": 0} if draw.leaves_choice and draw.temperature else {"do_sample": False}
    return _generate(
        model, draw.name, start, {**draws, "num_beams": 1, "max_new_tokens": new_tokens}, stop, [draw], **kw
    )


def search(
    model: transformers.PreTrainedModel, start: Tensor, new_tokens: int, beams: int, stop: Sequence[int] = ()
) -> Tensor:
    """Return start int64 [batch, seq] and what a beam search of transformers finds behind it, filled up with a stop."""
    asked = {"do_sample": False, "num_beams": beams, "max_new_tokens": new_tokens}
    return _generate(model, str(model.name_or_path), start, asked, stop, [])


def _generate(
    model: transformers.PreTrainedModel,
    name: str,
    start: Tensor,
    asked: Mapping[str, Any],
    stop: Sequence[int],
    processors: list[LogitsProcessor],
    **kw: Any,
) -> Tensor:
    """Return what `generate` gives with these settings alone."""
    length, positions = start.shape[1] + asked["max_new_tokens"], max_positions(model.config.get_text_config())
    if positions is not None and length > positions:
        raise CalibrationError(f"{name} has {positions} positions, {length} tokens are too many; ask for fewer")
    settings = GenerationConfig(
        **asked, use_cache=True, eos_token_id=list(stop) or None, pad_token_id=stop[0] if stop else None
    )
    start = start.to(model.device)
    generate, own = cast(Callable[..., Tensor], model.generate), model.generation_config
    model.generation_config = GenerationConfig()  # unset fields of `settings` would be filled from the checkpoint's
    try:
        written = generate(
            start, attention_mask=torch.ones_like(start), generation_config=settings, logits_processor=processors, **kw
        )
    finally:
        model.generation_config = own
    return written.cpu()


def sequence_nbytes(config: transformers.PretrainedConfig, seq_len: int) -> int:
    """Return the bytes that one sequence takes while `write` brings it to seq_len tokens, an upper bound.

    Keys and values of all layers count in float32, and twice, because each step copies them into larger tensors.
    config is that of the text model.
    """
    layers = _largest(config, "num_hidden_layers") or 256
    heads = _largest(config, "num_key_value_heads") or _largest(config, "num_attention_heads")
    hidden = _largest(config, "hidden_size")
    shared = hidden // max(1, _largest(config, "num_attention_heads"))
    head_dim = max(_largest(config, "head_dim", "qk_head_dim", "v_head_dim"), shared)
    cache = 2 * layers * (heads * head_dim or hidden) * seq_len * 4
    return 2 * cache + NBYTES_PER_LOGIT * config.vocab_size


def _largest(config: transformers.PretrainedConfig, *names: str) -> int:
    """Return the largest of these settings, which may be lists (one for each layer); 0 where there are none."""
    values = [getattr(config, name, None) for name in names]
    return max((max(v) if isinstance(v, (list, tuple)) else v for v in values if v), default=0)


def start_tokens(model: transformers.PreTrainedModel, generators: Sequence[torch.Generator]) -> Tensor:
    """Return int64 [generators, 1]: the token that begins a text, or else the one that ends it, or else random ones."""
    config = model.config.get_text_config()
    begin = config.bos_token_id
    for token in [begin] if begin is not None else end_tokens(model):
        return torch.full((len(generators), 1), _check_token(model, "bos_token_id", token, config.vocab_size))
    return torch.stack([torch.randint(config.vocab_size, (1,), generator=own) for own in generators])


def end_tokens(model: transformers.PreTrainedModel) -> tuple[int, ...]:
    """Return the tokens that end a text, from the checkpoint's generation settings or else its configuration."""
    end = model.generation_config.eos_token_id
    if end is None:
        end = model.config.get_text_config().eos_token_id
    listed = [] if end is None else end if isinstance(end, list) else [end]
    return tuple(_check_token(model, "eos_token_id", token, 1 << 31) for token in listed)


def _check_token(model: transformers.PreTrainedModel, key: str, token: Any, limit: int) -> int:
    """Return a token id of a configuration; CheckpointError unless it is one below the limit."""
    if type(token) is not int or not 0 <= token < limit:
        raise CheckpointError(
            f"{model.name_or_path}: {key} {shown(token)} is no token of the model; correct it in config.json and "
            "generation_config.json"
        )
    return token
