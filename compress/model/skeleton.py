"""Find a model's decoder blocks, their linears and shared inputs, and load it one block at a time.

A `Skeleton` is the transformers model on the meta device, with real buffers. Blocks are filled from the checkpoint
one at a time through transformers' own key conversion (renamed keys, merged experts) and emptied again. The decoder
blocks are the longest list of modules that is not inside another list; the linears are their `nn.Linear` modules and
the experts, which transformers stores as three-dimensional parameters and which are unfused here into one linear each.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from compress.errors import CheckpointError, UnsupportedModelError, first_line
from compress.model import expert_linears, paging, stored_weights, text_path
from compress.model.edits import Edits
from compress.model.load import FAILURES, empty_model, no_bars, plain_config, separator, without_weights
from compress.model.meta_pass import READ, arguments, flow, read_weights
from compress.model.text_path import RepeatedModules, find_stacks
from compress.runtime import hf, linears
from compress.runtime.experts import Experts, is_supported
from compress.runtime.linear import PackedModule
from compress.storage.checkpoint import CONFIG, Checkpoint, Readable
from compress.types import LinearSpec

OFF_TEXT_PATH = "beside the text"  # bytes of vision and audio towers, and of blocks that text skips
UNUSED = "not used by the model"  # stored tensors
DRAFT_HEADS = "draft heads"  # what is not packed of them
MIN_FEATURES = 16  # a linear narrower than this (a gate with one output) costs more in padding than it saves


class Skeleton:
    """A language model without weights, to be filled block by block; `edits` change what is loaded.

    `blocks` are those that text runs through; `text_path` says what else there is, such as a vision tower.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        with _one_line(checkpoint):
            self.config = plain_config(checkpoint.directory)  # packed linears are put in place here
        self.dtype = _dtype(self.config, checkpoint)
        self._separator = separator(checkpoint.directory, self.config)
        self.reshaped: dict[str, Any] = {}  # what `rebuild` has changed in the configuration of the text model
        self._unfusing = expert_linears.Unfusing()
        self._ahead = paging.ReadAhead()
        self._fused: dict[str, nn.Module] = {}  # what load() has replaced, to be put back by free()
        self._build()

    def _build(self) -> None:
        """Build the model of the configuration, and find its blocks and where its parameters are stored."""
        checkpoint = self.checkpoint
        with without_weights(), _one_line(checkpoint):
            self.model = empty_model(self.config, self.dtype)
        self.model.eval().tie_weights()
        self._keeping_types: hf.CompressQuantizer | None = None
        if packed := checkpoint.config.get("quantization_config"):
            packed_as = hf.CompressConfig.read(packed)
            hf.swap(self.model, packed_as)
            checkpoint = stored_weights.without_left_out(self.model, checkpoint, packed_as.left_out)
            self.checkpoint = checkpoint
            self._keeping_types = hf.keeping_types(self.model, packed_as)
        lists = find_stacks(self.model)
        self.blocks_name, *others = lists  # of the first stack
        self.second = len(lists[self.blocks_name]) if others else None  # number of the block that begins another one
        self.text_path = text_path.find_text_path(self.model, self.config, self.dtype, self.blocks_name)
        self.blocks = text_path.Blocks(lists, self.text_path.skipped)
        self.in_blocks = tuple(f"{name}." for name in lists)  # what names of all that is in lists of blocks begin with
        self.edits: Edits | None = None
        self.is_untied = False  # the output head has been given a weight of its own
        self.tied_configs = (self.model.config, self.config)  # of the model, and of the whole, before that
        self.aliases = _aliases(self.model)
        self._repeated = RepeatedModules(self.model, self.aliases, self.blocks_name)
        self.sources = stored_weights.sources(self.model, checkpoint)
        self.split = stored_weights.split(self.sources)

    def rebuild(self, values: dict[str, Any]) -> None:
        """Build the model anew with other values in the configuration of its text model, and no edits.

        Parameters of other shapes than before need other sources, which the caller gives them.
        """
        self.config = copy.deepcopy(self.config)
        for key, value in values.items():
            setattr(self.config.get_text_config(), key, value)
        self.reshaped = {**self.reshaped, **values}
        self._build()

    def check_tensors(self) -> None:
        """Raise CheckpointError unless every parameter has its tensor in the checkpoint, in its shape and kind.

        Tensors that are merged or (of three dimensions only) turned while they are loaded have shapes of their own.
        Tensors without a known use are refused too, and copies of a tied weight that differ.
        """
        stored_weights.check(self.model, self.checkpoint, self.sources)
        stored_weights.check_copies(self.checkpoint, self.aliases, self.sources)
        stored_weights.check_parameters(self.model, self.config, self.checkpoint, self.aliases, self.sources)

    def numel(self) -> int:
        """Return the numbers in parameters and stored buffers, packed weights as they were, tied ones once."""
        packed = [module for module in self.model.modules() if isinstance(module, PackedModule)]
        stored = {id(module.get_parameter(key)) for module in packed for key in module.specs}
        firsts = [(next(iter(each.specs), None), each) for each in packed]  # None: zeros, of which nothing is stored
        shapes = {id(each.get_parameter(key) if key else each): each.shape for key, each in firsts}
        plain = sum(p.numel() for p in self.model.parameters() if id(p) not in stored)
        state = self.model.state_dict()
        buffers = sum(b.numel() for n, b in self.model.named_buffers() if n in state and n in self.sources)
        return plain + buffers + sum(rows * columns for rows, columns in shapes.values())

    def unused_tensors(self) -> tuple[str, ...]:
        """Return the stored tensors that are nothing of the model or its heads, and further copies of a tied one."""
        unused = stored_weights.find_unused(self.model, self.aliases, self.sources)
        return tuple(sorted(unused.keys() - self.draft_tensors.keys()))

    @cached_property
    def draft_tensors(self) -> dict[str, Readable]:
        """The stored tensors of draft heads, which the class of the model does not hold, by name."""
        unused = stored_weights.find_unused(self.model, self.aliases, self.sources)
        return stored_weights.of_heads(unused, self.config)

    @property
    def vocab_size(self) -> int:
        """The number of token ids that the model knows."""
        return cast(int, self.config.get_text_config().vocab_size)

    def read(self, samples: Any, **options: Any) -> Any:
        """Run the body of the model on int64 tokens [batch, tokens], or what each of two stacks reads (inputs.py).

        The second text of a pair is marked where it can be. All that it runs must be loaded, or have something in its
        place.
        """
        given = arguments(self.model, samples)
        if self._separator is not None:
            parts = given["input_ids"] == self._separator
            options["token_type_ids"] = (parts.cumsum(1) - parts.long()).clamp(max=1)
        return self.model.base_model(**given, **options)

    def block_prefix(self, index: int) -> str:
        return "{}.{}.".format(*self.blocks.places[index])

    def is_off_text_path(self, name: str) -> bool:
        """Return whether a module or parameter is in a part of the model that text does not need."""
        skipped = [f"{self.blocks_name}.{number}" for number in self.text_path.skipped]
        return any(name == part or name.startswith(f"{part}.") for part in (*self.text_path.towers, *skipped))

    def load_block(self, index: int, device: torch.device) -> nn.Module:
        """Fill one block and unfuse its experts; for a GPU the next one is read meanwhile, into memory of the host."""
        prefix = self.block_prefix(index)
        self._load((name for name in self.sources if name.startswith(prefix)), device)
        block = self.blocks[index]
        self._repeated.take(prefix, is_first=index == 0)
        if device.type == "cuda" and index + 1 < len(self.blocks):
            behind = self.block_prefix(index + 1)
            self._ahead.begin(x for name, group in self.sources.items() if name.startswith(behind) for x in group)
        _place_buffers(block, device)
        missing = [n for n, p in block.named_parameters() if p.is_meta]
        if missing:
            raise CheckpointError(f"the checkpoint has no weights for {prefix}{missing[0]}; download it again")
        for name, module in list(block.named_modules()):
            if isinstance(module, PackedModule):
                module.check(prefix + name)
            if is_supported(module):
                self._fused[prefix + name] = module
                block.set_submodule(name, self._unfusing.experts(module, prefix + name))
        for name, module in linears.foreign(block):
            self._fused[prefix + name] = module
            block.set_submodule(name, linears.as_linear(module))
        if self.edits is not None:
            self.edits.block(index, block)
        return block

    def load_linear(self, name: str, device: torch.device) -> nn.Module:
        """Fill one linear outside of the blocks that text runs through."""
        module = self.model.get_submodule(name)
        self._load((f"{name}.{key}" for key, _ in module.named_parameters()), device)
        if missing := [key for key, parameter in module.named_parameters() if parameter.is_meta]:
            raise CheckpointError(f"the checkpoint has no weights for {name}.{missing[0]}; download it again")
        return module

    def linear(self, block: nn.Module, name: str) -> nn.Linear:
        """Return the linear of this full name in a loaded block."""
        linear = block.get_submodule(self._within(name))
        assert isinstance(linear, nn.Linear)
        return linear

    def expert(self, block: nn.Module, name: str) -> tuple[Experts, int]:
        """Return the module of all experts and the number of the expert that the linear of this full name is in."""
        path, number, _ = self._within(name).rsplit(".", 2)
        return cast(Experts, block.get_submodule(path)), int(number)

    def _within(self, name: str) -> str:
        """Return the path within its block of a full name."""
        prefix = next((prefix for prefix in self.in_blocks if name.startswith(prefix)), "")
        return name.removeprefix(prefix).partition(".")[2]

    def load_rest(self, device: torch.device, with_head: bool = False) -> None:
        """Fill everything outside the blocks that text needs (embeddings, final norm), the head only if asked to."""
        head = {id(p) for p in _parameters(None if with_head else self.model.get_output_embeddings())}
        head -= {id(p) for p in _parameters(self.model.get_input_embeddings())}
        named = dict(self.model.named_parameters(remove_duplicate=False))
        wanted = [n for n, p in named.items() if not n.startswith(self.in_blocks) and id(p) not in head]
        first = next(iter(named))  # transformers takes its device for that of the model
        wanted = [name for name in wanted if name == first or not self.is_off_text_path(name)]
        self._load((name for name in wanted if name in self.sources), device)
        _place_buffers(self.model, device)
        for names in self.aliases:  # a tied weight may be stored under any of its names
            loaded = [p for p in map(self.model.get_parameter, names) if not p.is_meta]
            for name in names if loaded else ():
                module, _, key = name.rpartition(".")
                self.model.get_submodule(module).register_parameter(key, loaded[0])
        for name in wanted:
            if self.model.get_parameter(name).is_meta and stored_weights.is_computed(self.model, name):
                stored_weights.compute(self.model, name, device)
            if self.model.get_parameter(name).is_meta:
                raise CheckpointError(f"the checkpoint has no weights for {name}; download it again")
        owners = {name.rpartition(".")[0] for name in wanted}
        for name, module in self.model.named_modules():
            if isinstance(module, PackedModule) and name in owners:
                module.check(name)
        if self.edits is not None:
            self.edits.rest(self.model)

    def untie(self) -> None:
        """Give an output head that is tied to the embeddings a weight of its own; both come from the same bytes."""
        head, embeddings = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        if head is None or not any(p is q for p in _parameters(head) for q in _parameters(embeddings)):
            return
        name = next(name for name, module in self.model.named_modules() if module is head) + ".weight"
        self.tied_configs = copy.deepcopy(self.tied_configs)
        for config in (self.model.config, self.config, self.config.get_text_config()):
            config.tie_word_embeddings = False
        tied = next(group for group in self.aliases if name in group)
        stored = next(self.sources[alias][0] for alias in tied if alias in self.sources)
        for alias in tied:
            self.sources.setdefault(alias, [stored.renamed(alias)])
        self.aliases.remove(tied)
        head.weight = nn.Parameter(torch.empty_like(head.weight, device="meta"), requires_grad=False)
        self.is_untied = True

    def free(self) -> None:
        """Give back all weights, but what later blocks share; buffers stay."""
        self._repeated.leave()
        for name, module in self._fused.items():
            self.model.set_submodule(name, module)
        self._fused.clear()
        for module in self.model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if not parameter.is_meta:
                    empty = torch.empty_like(parameter, device="meta")
                    module.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self._repeated.tie()

    def _load(self, names: Iterable[str], device: torch.device) -> None:
        tensors = {stored.name: self._ahead.take(stored) for name in names for stored in self.sources[name]}
        options = LoadStateDictConfig(
            dtype=self.dtype,
            dtype_plan=self.model._get_dtype_plan(self.dtype),  # what this class computes in float32
            hf_quantizer=self._keeping_types,
            device_map={"": str(device)},
            weight_mapping=cast(Any, stored_weights.conversions(self.model, self.checkpoint)),
        )
        with no_bars():
            info, _ = convert_and_load_state_dict_in_model(self.model, tensors, options)
        if info.conversion_errors or info.mismatched_keys or info.error_msgs:
            errors = [*info.conversion_errors, *info.mismatched_keys, *info.error_msgs]
            raise CheckpointError(f"the checkpoint does not fit its configuration: {str(errors[0])[:200]}")
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)

    def linears(self, is_needed: bool = True) -> tuple[list[LinearSpec], dict[str, str]]:
        """Return the linears of all blocks in model order, and those that cannot be quantized with the reason.

        Raises UnsupportedModelError if there is none and `is_needed`.
        """
        keys = flow(self.config, self.dtype).shared
        specs: list[LinearSpec] = []
        kept: dict[str, str] = {}
        for index, block in enumerate(self.blocks):
            prefix = self.block_prefix(index)
            own: dict[str, str] = {}  # first linear anywhere that reads a tensor -> the first one of the block
            for name, module in block.named_modules():
                full = prefix + name
                shape = linears.shape_of(module)
                if (first := self._repeated.first.get(full)) is not None:
                    kept[full] = f"it is one module with {first}"
                elif shape is not None:
                    key = own.setdefault(keys.get(full, full), full)  # what an encoder gives is read in all blocks
                    self.add(LinearSpec(full, shape, self.dtype, index, key), specs, kept)
                elif isinstance(module, nn.Linear):
                    kept[full] = "a linear with a forward pass of its own"
                elif isinstance(experts := expert_linears.specs(full, module, self.dtype, index), str):
                    kept[full] = experts
                else:
                    for spec in experts:
                        self.add(spec, specs, kept)
        read = read_weights(self.config, self.dtype, (spec.name for spec in specs if not spec.is_expert))
        kept |= dict.fromkeys(sorted(read), READ)
        specs = [spec for spec in specs if spec.name not in read]
        if is_needed and not specs:
            reasons = sorted(set(kept.values()))
            raise UnsupportedModelError(f"{self.blocks_name} has no linears that can be quantized; found: {reasons}")
        return specs, kept

    def other_nbytes(self, kept: dict[str, int]) -> dict[str, int]:
        """Sum the bytes of unchanged tensors, by stored name, by kind; what need not be there only if it is."""
        off_path = {stored.name for n, group in self.sources.items() if self.is_off_text_path(n) for stored in group}
        kinds = {
            **{UNUSED: set(self.unused_tensors()) & kept.keys(), DRAFT_HEADS: self.draft_tensors.keys() & kept.keys()},
            "embeddings": self._stored_names(self.model.get_input_embeddings()),
            **{"output head": self._stored_names(self.model.get_output_embeddings()), OFF_TEXT_PATH: off_path},
        }
        sizes = {kind: 0 for kind, names in kinds.items() if names or kind in ("embeddings", "output head")}
        sizes["norms and the rest"] = 0
        for name, nbytes in kept.items():
            sizes[next((kind for kind, names in kinds.items() if name in names), "norms and the rest")] += nbytes
        return sizes

    def _stored_names(self, module: nn.Module | None) -> set[str]:
        """Return the names on disk of a module's parameters."""
        own = {id(p) for p in _parameters(module)}
        names = [name for name, p in self.model.named_parameters(remove_duplicate=False) if id(p) in own]
        return {stored.name for name in names for stored in self.sources.get(name, [])}

    def add(self, spec: LinearSpec, specs: list[LinearSpec], kept: dict[str, str]) -> None:
        """Add a linear to those that can be quantized, or to those that are kept, with the reason."""
        if min(spec.shape) < MIN_FEATURES:
            kept[spec.name] = f"narrower than {MIN_FEATURES} features"
        elif not self.weight_sources(spec):
            kept[spec.name] = "its weight is not stored under a name of its own"
        else:
            specs.append(spec)

    def weight_sources(self, spec: LinearSpec) -> list[Readable]:
        """Return the stored tensors of a linear's weight (of an expert: of weights and biases of all in its module).

        None for a weight that is stored in one tensor with others: the tensor could not be left out.
        """
        weight = f"{spec.name}.weight"
        tied = (group for group in self.aliases if weight in group)
        names = spec.parameters or tuple(next(tied, [weight]))
        tensors = [stored for name in names for stored in self.sources.get(name, [])]
        return tensors if spec.is_expert else [stored for stored in tensors if stored.name not in self.split]


@contextmanager
def _one_line(checkpoint: Checkpoint) -> Iterator[None]:
    """Turn what transformers raises for a damaged or unknown configuration into one clear line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of layers of no size
            yield
    except FAILURES as error:
        reason, advice = first_line(error), ""
        if checkpoint.config.get("model_type") not in transformers.CONFIG_MAPPING:
            advice = "; `compress quantize MODEL --model-free int4` rounds the weights of a model that it does not know"
        raise UnsupportedModelError(
            f"{checkpoint.directory / CONFIG} does not give a language model ({type(error).__name__}: {reason}){advice}"
        ) from error


def _dtype(config: transformers.PretrainedConfig, checkpoint: Checkpoint) -> torch.dtype:
    """Return the configured dtype, else that of most stored values."""
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    sizes: dict[torch.dtype, int] = {}
    for stored in checkpoint.tensors.values():
        if stored.dtype.is_floating_point:
            sizes[stored.dtype] = sizes.get(stored.dtype, 0) + stored.nbytes
    if not sizes:
        raise CheckpointError(f"{checkpoint.directory} stores no floating-point tensors")
    return max(sizes, key=lambda dtype: sizes[dtype])


def _aliases(model: nn.Module) -> list[list[str]]:
    """Return the names of parameters that have several (tied weights)."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _place_buffers(module: nn.Module, device: torch.device) -> None:
    """Move the buffers (rotary tables) that have values to the device."""
    for owner in module.modules():
        for name, buffer in list(owner.named_buffers(recurse=False)):
            if not buffer.is_meta and buffer.device != device:
                setattr(owner, name, buffer.to(device))


def _parameters(module: nn.Module | None) -> list[nn.Parameter]:
    return [] if module is None else list(module.parameters())
