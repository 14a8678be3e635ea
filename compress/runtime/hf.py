"""Load and save packed models through transformers, as its quantization method "compress".

config.json holds

    "quantization_config": {
        "quant_method": "compress", "version": 1,
        "default": {"format": "int", "params": {...}},
        "modules": {"model.layers.0.self_attn.q_proj": {}, "model.layers.0.mlp.up_proj": {"params": {...}}, ...},
        "experts": {"model.layers.3.mlp.experts": {"threshold": 0.45, "protected": 151.2, "taken": 0.3}}
    }

Every packed linear and embedding is listed; its entry is laid over `default`, "format", "params", "ops", "activations",
"lowrank" and "sparsity" each as a whole. "ops", {"input": [...], "output": [...]} with names of
compress/formats/transforms.py, may be absent where there are none. "activations", the fields of `Activations` of
compress/types, is absent (null, to differ from `default`) where inputs are not quantized, and "lowrank", the fields of
`LowRank`, where there is no low-rank part, "sparsity", those of `InputSparsity`, where all inputs are read. What is not
listed is loaded as transformers always does. A checkpoint that does not fit its list is an error, never random weights.

An embedding whose table is also the output head's is listed once, under its own name. Its "ops" are those of the head;
a row that is looked up passes the transposes of the orthogonal ones.

"draft_heads", absent where none of them is packed, names those of the listed linears that are in draft heads, with
their shapes [out, in]. The class of the model has no such modules (compress/runtime/draft_heads.py).

"experts", absent where there are none, names the modules of experts that a token may go without, with the fields of
`Pruning` of compress/types. Their linears must be listed.

"kv_cache", absent where generation keeps keys and values as they are, is described in compress/runtime/kv_config.py.

Beside "quantization_config" stands a notice that makes a transformers without this package fail
(compress/storage/json_text.py). It is taken away when a model is loaded, and put back when one is saved.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from compress.errors import CheckpointError, first_line, shown
from compress.formats import stored
from compress.runtime import embedding, expert_layouts, levels, linears, saving, step
from compress.runtime.experts import Experts, is_fused_experts
from compress.runtime.linear import PackedLinear, PackedModule, are_unpacked
from compress.storage import manifest, paths
from compress.storage.checkpoint import MANIFEST
from compress.types import Pruning, Stored

if TYPE_CHECKING:  # this file is imported while transformers.modeling_utils may be half loaded
    from transformers import PreTrainedModel

METHOD = paths.METHOD
LAYOUT_VERSION = 1


class CompressConfig(QuantizationConfigMixin):
    """`quantization_config` of config.json; `modules` maps every packed linear to what differs from `default`."""

    def __init__(
        self,
        version: int = LAYOUT_VERSION,
        default: dict[str, Any] | None = None,
        modules: dict[str, dict[str, Any]] | None = None,
        experts: dict[str, dict[str, Any]] | None = None,
        kv_cache: dict[str, Any] | None = None,
        quant_method: str = METHOD,
        **others: Any,
    ) -> None:
        """Read the section; `others` may have `draft_heads` and `level`. CheckpointError for what it cannot mean."""
        heads, unknown = others.get(saving.DRAFT_HEADS), others.keys() - {saving.DRAFT_HEADS, "level"}
        if type(version) is not int or version != LAYOUT_VERSION:
            raise CheckpointError(
                f"quantization_config has version {shown(version)}, this compress reads {LAYOUT_VERSION}; upgrade "
                "compress"
            )
        if unknown:
            raise CheckpointError(f"quantization_config has unknown keys {shown(sorted(unknown))}; upgrade compress")
        saving.check_shapes(heads, modules)
        for key, table in (("default", default), ("modules", modules), ("experts", experts)):
            inner = table.values() if isinstance(table, dict) and key != "default" else ()
            if not isinstance(table, dict | None) or not all(isinstance(entry, dict) for entry in inner):
                raise CheckpointError(
                    f"quantization_config: {key} is not a table{' of tables' if key != 'default' else ''}; "
                    "download or write the checkpoint again"
                )
        self.quant_method = quant_method  # type: ignore[assignment]  # the annotation lists the built-in methods
        self.version = version
        self.default = default or {}
        self.modules = modules or {}
        self.experts = experts or {}
        self.kv_cache = kv_cache
        self.draft_heads: dict[str, list[int]] = heads or {}
        self.gone: Set[str] = frozenset()  # listed names that are left out of the next file (saving.py)
        self.left_out = ""  # pattern of the names of tensors that are stored and not loaded
        if others.get("level") is not None:
            levels.choose(self, others["level"])

    @property
    def names_of_model(self) -> list[str]:
        """The names of the packed modules of the model itself."""
        return [name for name in self.modules if name not in self.draft_heads]

    @classmethod
    def read(cls, packed: Any) -> CompressConfig:
        """Return what config.json holds; CheckpointError if it is not ours."""
        method = packed.get("quant_method") if isinstance(packed, dict) else packed
        if method != METHOD or method is packed:
            raise CheckpointError(
                f"quantization_config is of {shown(method)}, not of {METHOD}; give a checkpoint that compress wrote"
            )
        return cls(**packed)

    def to_dict(self) -> dict[str, Any]:
        """As config.json stores it; without parts that are empty and that older versions do not know."""
        values = {k: value for k, value in super().to_dict().items() if k not in ("gone", "left_out")}
        return {
            k: value for k, value in values.items() if value or k not in ("experts", "kv_cache", saving.DRAFT_HEADS)
        }


def with_level(config: dict[str, Any], level: int) -> dict[str, Any]:
    """Return a config.json of which a level of the weights is all that is loaded; CheckpointError if there is none."""
    if not config.get("quantization_config"):
        raise CheckpointError(f"weights that are not packed have no levels, so no level {level}; leave the level out")
    section = {**config["quantization_config"], "level": level}
    CompressConfig.read(section)
    return {**config, "quantization_config": section}


def build_config(
    modules: Mapping[str, Stored],
    experts: Mapping[str, Pruning] | None = None,
    draft_heads: Mapping[str, tuple[int, int]] | None = None,
) -> CompressConfig:
    """Return the configuration that lists these linears, the most common storage as default, and pruned experts.

    draft_heads: shapes of those of the linears that are in draft heads.
    """
    tables = {name: stored.to_dict(module) for name, module in modules.items()}
    if not tables:
        return CompressConfig()
    counts = Counter(map(repr, tables.values()))
    default = max(tables.values(), key=lambda table: counts[repr(table)])  # the first of the most common
    entries: dict[str, dict[str, Any]] = {}
    for name, entry in tables.items():
        entries[name] = {key: value for key, value in entry.items() if value != default[key]}
        if "format" in entries[name]:
            entries[name]["params"] = entry["params"]  # equal ones of another format are other ones
    if not any(default["ops"].values()):
        del default["ops"]
    for key in ("activations", "lowrank", "sparsity"):
        if default[key] is None:
            del default[key]
    pruned = {name: dataclasses.asdict(pruning) for name, pruning in (experts or {}).items()}
    shapes = {name: list(shape) for name, shape in (draft_heads or {}).items()}
    return CompressConfig(default=default, modules=entries, experts=pruned, draft_heads=shapes)


def scheme(config: CompressConfig, name: str) -> Stored:
    """Return how a listed linear is stored."""
    return stored.from_dict({**config.default, **config.modules[name]}, f"quantization_config: {name}")


def swap(model: nn.Module, config: CompressConfig) -> None:
    """Replace every listed linear of the model, in place, by an uninitialized PackedLinear on the same device.

    A fused-experts module with listed experts becomes `Experts`, all of whose linears must be listed, and prunes as
    the configuration says.
    """
    listed = _names_in(model, config.names_of_model)
    opened = _open_experts(model, {name.rsplit(".", 2)[0] for name in listed})
    for name, listed_name in listed.items():
        try:
            if not embedding.swap(model, name, scheme(config, listed_name)):
                _swap_linear(model, name, scheme(config, listed_name))
        except ValueError as error:
            raise CheckpointError(f"quantization_config: {name}: {first_line(error)}") from error
    for name in opened:
        for part, module in model.get_submodule(name).named_modules(prefix=name):
            if isinstance(module, nn.Linear):
                raise CheckpointError(f"{part} is not listed as packed, but other experts beside it are")
    _set_pruning(model, config)
    linears.set_aside_weights(model)


def _swap_linear(model: nn.Module, name: str, packed_as: Stored) -> None:
    """Replace one listed linear, and those tied to it; ValueError for operations that cannot have its shape."""
    linear, shape = _linear(model, name)
    weight, has_bias = linear.get_parameter("weight"), linear.bias is not None
    dtype = linear.get_parameter("bias").dtype if has_bias else weight.dtype
    packed = PackedLinear(packed_as, shape, has_bias, dtype, weight.device)
    linears.remember(packed, linear)
    tied = embedding.tied_to(model, f"{name}.weight")
    embedding.pack_tied(model, name, tied, packed)
    model.set_submodule(name, packed)


class CompressQuantizer(HfQuantizer):
    """The quantizer that from_pretrained and save_pretrained call."""

    quantization_config: CompressConfig
    packed: Set[str] = frozenset()  # names of packed tensors

    def update_attn_implementation(self, config: Any) -> Any:
        """Take the notice away; transformers calls this after it has read config.json, before it looks for weights."""
        return saving.take_notice_away(config)

    update_tp_plan = update_attn_implementation  # called in its place before transformers 5.18

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> Any:
        """Before a model is saved, leave out of the saved list what is packed no more, such as merged linears.

        Experts of which some are packed no more are written fused, as a transformers without us holds them. The model
        stays as it is: an adapter that is merged may be taken out again.
        """
        config = self.quantization_config
        listed = _names_in(model, config.names_of_model)
        pruned = _names_in(model, config.experts)
        is_bare = getattr(model, "base_model", None) is model  # its list stays that of the whole model
        gone = saving.no_longer_packed(model, listed) | (set() if is_bare else config.modules.keys() - listed.values())
        fused: dict[str, nn.Module] = {}
        for name, module in model.named_modules():
            if isinstance(module, Experts) and module.is_partly_plain():
                gone |= {listed_name for inner, listed_name in listed.items() if inner.startswith(f"{name}.")}
                gone |= {pruned[name]} if name in pruned else set()
                fused[name] = module.fuse(model.dtype)
        config.gone = gone
        return saving.state_with(model, fused) if fused else None, {}

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Keep the type of a packed tensor, whatever the model says of parameters whose names are like its name."""
        if any(target in self.packed for target in getattr(converter, "target_patterns", ())):
            return None  # as it is stored: what is not as specified is found later
        other: torch.dtype | None = super().get_new_dtype(converter, param, dtype)
        return other

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if not self.pre_quantized:
            raise CheckpointError("this checkpoint is not packed; write a packed one with `compress quantize` first")
        files = [Path(file) for file in kwargs.get("checkpoint_files") or ()]
        self._directory = files[0].parent if files else None  # None: a state dict in memory
        if self._directory is not None:
            _check_files(model, self._directory, {file.name for file in files})
        saving.offer_heads(model, self.quantization_config.draft_heads, place_packed)
        swap(model, self.quantization_config)
        levels.leave_out(model, self.quantization_config.left_out)
        self.packed = _packed_tensors(model)
        for module in _packed_modules(model):
            if "weight" not in module.specs:  # of a cut matrix there is one, which is loaded
                module.weight = _placeholder(module.shape)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        for module in _packed_modules(model):
            vars(module).pop("weight", None)
        linears.set_aside_weights(model)
        levels.offer(model)
        for name, module in model.named_modules():
            if isinstance(module, PackedModule):
                saving.check_loaded(name, module)
        if are_unpacked(_packed_modules(model)):
            self.dequantize(model)
        if any(isinstance(module, PackedModule) for module in model.modules()):
            step.speed_up(model)  # a model of which nothing is packed computes as its original
        if self.quantization_config.kv_cache is not None:
            from compress.runtime import kv_config

            kv_config.use(model, self.quantization_config.kv_cache, self._directory)

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | str | None = None) -> PreTrainedModel:
        step.forget(model)
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype or model.dtype
        for name, module in list(model.named_modules()):
            if isinstance(module, Experts):
                model.set_submodule(name, module.fuse(dtype))
        for name, module in list(model.named_modules()):
            if isinstance(module, PackedLinear):
                plain = linears.dequantize_module(module, dtype)
                model.set_submodule(name, plain if module.specs else plain.to(model.device))
        embedding.restore(model, dtype)
        levels.offer(model)  # there are none any more
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # adapters beside packed linears: gradients pass through these


def register() -> None:
    """Make from_pretrained know the method; runs when this file is imported, and again does no harm."""
    AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = CompressConfig
    AUTO_QUANTIZER_MAPPING[METHOD] = CompressQuantizer
    saving.keep_notice()
    levels.take_keyword()


def _check_files(model: PreTrainedModel, directory: Path, weights: set[str]) -> None:
    """Compare the files that are about to be loaded with the manifest beside them."""
    is_verified = manifest.is_asked()
    if is_verified and not (directory / MANIFEST).is_file():
        from compress.runtime import kv_config

        kv_config.fetch(model, directory, MANIFEST)
    manifest.check_loaded(directory, weights, is_verified)


def _set_pruning(model: nn.Module, config: CompressConfig) -> None:
    """Set on the experts modules how the configuration prunes them."""
    for name, listed_name in _names_in(model, config.experts).items():
        where = f"quantization_config: experts: {listed_name}"
        pruning = stored.from_table(Pruning, config.experts[listed_name], where)
        try:
            module = model.get_submodule(name)
        except AttributeError as error:
            raise CheckpointError(f"{where}: {type(model).__name__} has no such module") from error
        if not isinstance(module, Experts):
            raise CheckpointError(f"{where} is a {type(module).__name__}, not a module of packed experts")
        module.pruning = pruning


def _names_in(model: nn.Module, listed: Collection[str]) -> dict[str, str]:
    """Return the listed modules: name in this model -> name in the list.

    The list names the modules of the whole model. A bare body (AutoModel) has no head and lacks the body's prefix; the
    class of a text part (saving.py) has other names, and one of another task has another head.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    bare = getattr(model, "base_model", None) is model
    if not bare or not any(name.startswith(prefix) for name in listed):
        return saving.without_other_head(model, saving.names_in(model, listed))
    return {name.removeprefix(prefix): name for name in listed if name.startswith(prefix)}


def _open_experts(model: nn.Module, names: set[str]) -> list[str]:
    """Replace the fused-experts modules among `names` by `Experts`, and return the names of those."""
    fused_names = [name for name, module in model.named_modules() if name in names and is_fused_experts(module)]
    for name in fused_names:
        fused = model.get_submodule(name)
        if isinstance(reason := expert_layouts.describe(fused), str):
            raise CheckpointError(f"{name} ({type(fused).__name__}) cannot be loaded: {reason}")
        model.set_submodule(name, Experts.from_fused(fused))
    return fused_names


def place_packed(model: nn.Module, config: CompressConfig) -> CompressQuantizer:
    """Replace the listed linears, and return what keeps the types of their tensors while they are loaded."""
    swap(model, config)
    return keeping_types(model, config)


def keeping_types(model: nn.Module, config: CompressConfig) -> CompressQuantizer:
    """Return what keeps the types of the packed tensors of a model while its weights are loaded."""
    quantizer = CompressQuantizer(config, pre_quantized=True)
    quantizer.packed = _packed_tensors(model)
    return quantizer


def _packed_tensors(model: nn.Module) -> set[str]:
    """Return the names of all packed tensors."""
    named = ((name, module) for name, module in model.named_modules() if isinstance(module, PackedModule))
    return {f"{name}.{key}" for name, module in named for key in module.specs}


def _packed_modules(model: nn.Module) -> list[PackedModule]:
    return [module for module in model.modules() if isinstance(module, PackedModule)]


def _placeholder(shape: tuple[int, int]) -> torch.Tensor:
    """Return a zero-byte placeholder parameter of the weight's shape [out_features, in_features].

    Some models initialize the weights of their linears by name whatever was loaded; this one is marked as loaded.
    """
    weight = torch.empty(shape, device="meta")
    weight._is_hf_initialized = True  # type: ignore[attr-defined]  # as transformers marks what it has loaded
    return weight


def _linear(model: nn.Module, name: str) -> tuple[nn.Module, tuple[int, int]]:
    """Return a listed linear, of any class, and its shape (out_features, in_features)."""
    try:
        module = model.get_submodule(name)
    except AttributeError as error:
        raise CheckpointError(f"{name} is listed as packed, but {type(model).__name__} has no such module") from error
    shape = linears.shape_of(module)
    if shape is None:
        raise CheckpointError(f"{name} is listed as packed, but is a {type(module).__name__}, not a linear")
    return module, shape


register()
