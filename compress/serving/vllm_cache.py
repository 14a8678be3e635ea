"""Keep the keys and values of a model in packed pages of vLLM, as the `kv_cache` section of its checkpoint says.

vLLM asks the quantization method of a checkpoint about every attention layer that it builds. `VllmCache.place` then
puts `PagedAttention` and its backend in the place of vLLM's own, layer by layer. vLLM itself sees three things of them:
`PagedBackend.customize_spec`, the bytes of a token and KV head, from which it makes pages and counts blocks;
`do_kv_cache_update`, which writes the codes of new tokens into their slots; and `forward`, attention of the new tokens
over the pages. A token reads its own prompt through the codes, too, so that what it sees does not depend on chunks, on
what was cached before, or on other requests. No graph of CUDA records this attention (vLLM then runs it between its
graphs), and no page is sent to other engines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from compress.errors import UnsupportedModelError
from compress.kernels import dispatch, paged
from compress.serving.vllm_cache_settings import CheckpointCache, LayerCache, vllm_types

logger = init_logger("vllm.compress")
LEAST_TOKENS = 16  # pages have a multiple of so many
DRAFT_HEADS = "mtp"  # a part of the names of layers that are no layers of the model


@dataclass
class PagedMetadata(AttentionMetadata):
    """The requests of a step."""

    tokens: int  # new ones of all requests, padding included
    starts: Tensor  # int32 [requests + 1], the first new token of each request
    lengths: Tensor  # int32 [requests], the tokens of each request, new ones included
    blocks: Tensor  # int32 [requests, most blocks]


class PagedBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Make the metadata of a step."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        """Return what the layers of a group read of it."""
        common = common_attn_metadata
        if common.causal is not True:
            raise UnsupportedModelError(
                "kv_cache: packed pages are not read by tokens that attend to later ones; serve with "
                "--kv-cache-dtype bfloat16"
            )
        return PagedMetadata(
            common.num_actual_tokens, common.query_start_loc, common.seq_lens, common.block_table_tensor
        )

    def update_block_table(self, metadata: PagedMetadata, blk_table: Tensor, slot_mapping: Tensor) -> PagedMetadata:
        """Return the same requests with the blocks of another group."""
        return replace(metadata, blocks=blk_table)


class PagedAttention(AttentionImpl[PagedMetadata]):
    """Attention of a layer over its packed pages, in the place of vLLM's own."""

    def __init__(self, layer: Any, layer_cache: LayerCache) -> None:
        """layer: with vLLM's own attention, whose settings hold on."""
        self.num_heads, self.head_size, self.num_kv_heads = layer.num_heads, layer.head_size, layer.num_kv_heads
        self.scale, self.kv_cache_dtype = float(layer.impl.scale), layer.kv_cache_dtype
        self.sliding_window, self.attn_type = layer.sliding_window, layer.attn_type
        self.kv_sharing_target_layer_name = layer.kv_sharing_target_layer_name
        self.cache = layer_cache

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write tokens [T, h, d] into pages uint8 [blocks, h, N, C]; a slot of -1 is padding."""
        if not kv_cache.numel():  # none is allocated yet
            return
        count, cache = min(len(key), len(slot_mapping)), self.cache
        paged.write(
            cache.keys.turn.into(key[:count]),
            cache.values.turn.into(value[:count]),
            kv_cache,
            slot_mapping[:count],
            cache.pages(kv_cache.shape[2]),
            cache.keys.levels,
            cache.values.levels,
        )

    def forward(  # noqa: PLR0913, PLR0917 (what vLLM gives)
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PagedMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write to output what queries [T, H, d] see.

        Without metadata, while vLLM measures the memory of a step, no query sees anything, and as much is allocated.
        """
        cache = self.cache
        if attn_metadata is None or not kv_cache.numel():
            turned = cache.keys.turn.query(query) * self.scale
            mixed = turned.new_zeros(*turned.shape[:2], cache.values.codes.width)
            output.copy_(cache.values.turn.out_of(mixed))
            return output.zero_()
        count = attn_metadata.tokens
        mixed = paged.attend(
            cache.keys.turn.query(query[:count]) * self.scale,
            kv_cache,
            attn_metadata.blocks,
            attn_metadata.starts,
            attn_metadata.lengths,
            cache.pages(kv_cache.shape[2]),
            cache.keys.levels,
            cache.values.levels,
            self.sliding_window,
        )
        output[:count] = cache.values.turn.out_of(mixed)
        return output


class PagedBackend(AttentionBackend):
    """What vLLM asks of packed pages; a subclass, made by `backend_of`, for each number of bytes of a token."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    token_bytes: ClassVar[int]  # of a KV head: keys and values, codes and parameters

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(LEAST_TOKENS)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return those in which the page of a head is one run.

        BLHNC would need no padding for pages of several sizes beside sliding windows, but vLLM 0.32.0 fails to group
        some of those.
        """
        return KVCacheLayout.LBHNC, KVCacheLayout.BLHNC

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Say how many bytes a token of a KV head has."""
        return replace(spec, dtype=torch.uint8, state_content_bytes=cls.token_bytes)

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[PagedAttention]:
        return PagedAttention

    @staticmethod
    def get_builder_cls() -> type[PagedBuilder]:
        return PagedBuilder

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False


@cache
def backend_of(token_bytes: int) -> type[PagedBackend]:
    """Return the backend of pages with so many bytes for a token of a KV head."""
    made = type(f"PagedBackend{token_bytes}", (PagedBackend,), {"token_bytes": token_bytes, "__module__": __name__})
    globals()[made.__name__] = made  # vLLM finds classes by their names
    return made


# What packed pages do not hold, or their kernels do not compute, by the layer and the settings of the engine.
REFUSED: tuple[tuple[str, Callable[[Any, Any], Any]], ...] = (
    ("latent attention (MLA)", lambda layer, engine: isinstance(layer, MLAAttention)),
    ("attention of encoders", lambda layer, engine: layer.attn_type != AttentionType.DECODER),
    ("attention sinks", lambda layer, engine: layer.has_sink),
    ("ALiBi", lambda layer, engine: getattr(layer.impl, "alibi_slopes", None) is not None or layer.use_alibi_sqrt),
    ("a cap on scores", lambda layer, engine: getattr(layer.impl, "logits_soft_cap", None) not in {None, 0}),
    ("tokens of images that attend to later ones", lambda layer, engine: layer.use_mm_prefix),
    ("attention of a kind of their own", lambda layer, engine: not _is_plain(layer)),
    ("a KV connector", lambda layer, engine: engine.kv_transfer_config is not None),
    ("context parallelism", lambda layer, engine: engine.parallel_config.decode_context_parallel_size > 1),
    ("context parallelism", lambda layer, engine: engine.parallel_config.prefill_context_parallel_size > 1),
    ("--kv-cache-dtype", lambda layer, engine: engine.cache_config.cache_dtype != "auto"),
)


def _is_plain(layer: Any) -> bool:
    """Return whether a layer is what every decoder has, with the backend that vLLM chooses for that."""
    return type(layer) is Attention and layer.backend.get_class() is layer.attn_backend


def is_read(layer: Any, layer_cache: LayerCache) -> bool:
    """Return whether these pages are read fast enough where the layer runs: on a CPU always, on a GPU by a kernel."""
    device = layer_cache.keys.turn.forward.device
    if device.type == "cpu":
        return True
    kernel = dispatch.pages(device)
    pages = torch.empty(1, layer.num_kv_heads, LEAST_TOKENS, layer_cache.token_bytes, dtype=torch.uint8)
    queries = torch.empty(1, layer.num_heads, layer.head_size)
    return kernel is not None and bool(kernel.supports(queries, pages, layer_cache.pages(LEAST_TOKENS)))


class VllmCache:
    """The cache of a checkpoint in vLLM: what becomes of each of its attention layers, and what is said of it."""

    def __init__(self, stored: CheckpointCache) -> None:
        self.stored = stored
        self._asked: set[str] = set()  # layers
        self._said: set[str] = set()
        self._sizes: list[tuple[int, int]] = []  # of layers, bytes of a token: as kept, and as vLLM has it

    def place(self, layer: Any, prefix: str) -> None:
        """Give an attention layer packed pages, where its checkpoint and its kind allow it."""
        if prefix in self._asked:
            return  # vLLM asks again when weights are loaded
        self._asked.add(prefix)
        engine = get_current_vllm_config()
        reason = next((what for what, applies in REFUSED if applies(layer, engine)), None)
        if reason is not None:
            line = f"the kv_cache section is not applied to layers with {reason}"
            self._say(line, f"{line} (the first is {prefix}): vLLM keeps a cache of its own there")
            return
        layer_cache = self._of_layer(layer, prefix, engine)
        if layer_cache is not None:
            layer.impl = PagedAttention(layer, layer_cache)
            layer.attn_backend = backend_of(layer_cache.token_bytes)
            layer.backend = AttentionBackendEnum.CUSTOM

    def _of_layer(self, layer: Any, prefix: str, engine: Any) -> LayerCache | None:
        """Return how a layer is coded, one that reads the pages of another like that one; None: it stays exact."""
        if layer.kv_sharing_target_layer_name is not None:
            target = engine.compilation_config.static_forward_context[layer.kv_sharing_target_layer_name]
            return target.impl.cache if isinstance(target.impl, PagedAttention) else None
        index = extract_layer_index(prefix)
        if DRAFT_HEADS in prefix.split(".") or index >= self.stored.layer_count:
            return None
        shape = layer.num_kv_heads, layer.head_size, layer.head_size_v
        ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        layer_cache = self.stored.layer(index, shape, ranks)
        if layer_cache is not None and not is_read(layer, layer_cache):
            size = layer_cache.token_bytes
            self._say(
                "device",
                f"the kv_cache section is not applied: on this device no kernel reads pages of {size} bytes a token "
                f"and KV head; vLLM's own types of that size are {vllm_types(size, layer.head_size)}",
            )
            return None
        if self.stored.note is not None:
            self._say("note", self.stored.note)
        exact = (layer.head_size + layer.head_size_v) * layer.kv_cache_torch_dtype.itemsize
        kept = exact if layer_cache is None else layer_cache.token_bytes
        self._sizes.append((layer.num_kv_heads * kept, layer.num_kv_heads * exact))
        return layer_cache

    def finish(self) -> None:
        """Say what has become of the layers that are built."""
        if not self._asked:
            self._say("", "the kv_cache section is not applied: the attention layers of this model do not ask for it")
        kept, exact = (sum(sizes) for sizes in zip(*self._sizes, strict=True)) if self._sizes else (0, 0)
        if kept < exact:
            line = f"keys and values in packed pages: {kept} bytes a token, {kept / exact:.3f} of vLLM's own cache"
            if line not in self._said:
                self._said.add(line)
                logger.info(line)

    def _say(self, key: str, line: str) -> None:
        if key not in self._said:
            self._said.add(key)
            logger.warning(line)
