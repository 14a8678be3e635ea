"""Write low-rank parts as LoRA adapters in PEFT's format, and train them on a packed, frozen base (arXiv 2106.09685).

An adapter of a packed linear is y = base(x) + B (A x), A [rank, in] and B [out, rank], with scaling 1. On disk it is a
directory as PEFT writes it:

    adapter_config.json          LoRA settings; ranks that differ are in rank_pattern
    adapter_model.safetensors    base_model.model.<linear>.lora_A.weight, .lora_B.weight; a fingerprint of the base

`export` takes the low-rank parts out of a packed checkpoint; the rest, still packed, and the adapter together are the
same function. PEFT trains it on the base that `from_pretrained` loads, as it trains adapters of its own there
(compress/runtime/peft_hooks.py):

    model = PeftModel.from_pretrained(base, adapter, is_trainable=True)

Without PEFT, `load`, `parameters` and `save` do what a training loop needs. Where operations lie around the stored
matrix (compress/formats/transforms.py) the factors are turned out of their basis, and stay as small.

The fingerprint is over the packed linears (names, how they are stored, samples of the bytes). PEFT does not keep it
when it saves; then only names and shapes are compared.

Not done by `load`: adapters with DoRA, biases or dropout; training of the base.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from compress.errors import CheckpointError, OutputError, shown
from compress.formats import lowrank, transforms
from compress.model.skeleton import Skeleton
from compress.run import companion_files
from compress.runtime import hf
from compress.runtime.linear import PackedLinear
from compress.storage import files, json_text
from compress.storage.checkpoint import CONFIG, open_checkpoint, read_header, read_json, write_shard, write_text
from compress.storage.files import open_regular
from compress.storage.manifest import RECIPE
from compress.types import PackedWeight, WeightTransforms

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
FINGERPRINT = "compress_base"  # key in the header of the weights
ADAPTED_PREFIX = "base_model.model."
SAMPLED = 1 << 16  # bytes at the start and the end of each tensor that the fingerprint is over
REFUSED = {"use_dora": False, "bias": "none", "fan_in_fan_out": False}  # what we can load has these values

Factors = tuple[Tensor, Tensor]  # A [rank, in], B [out, rank]


class Adapted(nn.Module):
    """A packed linear, frozen, with an adapter beside it."""

    def __init__(self, base_layer: PackedLinear, a: Tensor, b: Tensor) -> None:
        """Start training from a [rank, in] and b [out, rank], which are kept in float32."""
        super().__init__()
        self.base_layer, device = base_layer.requires_grad_(False), next(base_layer.parameters()).device
        self.lora_a, self.lora_b = (nn.Parameter(factor.detach().to(device).float().clone()) for factor in (a, b))

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for x [..., in], in the floating type of x."""
        added = F.linear(F.linear(x.to(self.lora_a.dtype), self.lora_a), self.lora_b)
        return self.base_layer(x) + added.to(x.dtype)


def adapted_linears(model: nn.Module) -> dict[str, Adapted]:
    """Return the linears that have an adapter, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapted)}


def parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return A and B of all adapters, float32, to be trained, and freeze everything else of the model."""
    model.requires_grad_(False)
    trained = [factor for module in adapted_linears(model).values() for factor in (module.lora_a, module.lora_b)]
    for factor in trained:
        factor.requires_grad_()
    return trained


def separate(model: nn.Module) -> int:
    """Make an adapter of the low-rank part of every packed linear, in place; returns their number."""
    corrected = {
        name: layer
        for name, layer in _packed_targets(model).items()
        if layer.lowrank is not None and not layer.stored.has_rest_part
    }
    for name, layer in corrected.items():
        weight = layer.packed()
        bare = PackedLinear.from_packed(_without_part(weight), layer.bias)
        model.set_submodule(name, Adapted(bare, *factors(weight)))
    return len(corrected)


def attach(model: nn.Module, rank: int, match: str = "*", seed: int = 0) -> int:
    """Put new adapters beside the packed linears whose names match, in place; return their number.

    A is random with entries of variance 1 / (3 in), B zero, as LoRA starts: the function stays what it is.
    """
    generator, count = torch.Generator().manual_seed(seed), 0
    for name, layer in _packed_targets(model).items():
        if fnmatchcase(name, match):
            bound = layer.in_features**-0.5
            a = (2 * torch.rand(rank, layer.in_features, generator=generator) - 1) * bound
            model.set_submodule(name, Adapted(layer, a, torch.zeros(layer.out_features, rank)))
            count += 1
    return count


def factors(weight: PackedWeight) -> Factors:
    """Return the low-rank part of a weight as float32 factors of an adapter, turned out of the operations' basis."""
    ops, part = weight.stored.ops, weight.stored.lowrank
    assert part is not None
    a, b = lowrank.part_factors(weight.tensors, part, weight.shape, torch.float32)
    b = b.T
    if ops:
        a = transforms.effective(a, WeightTransforms(input=ops.input), weight.tensors)
        b = transforms.effective(b, WeightTransforms(output=ops.output), weight.tensors)
    return a.contiguous(), b.contiguous()


def save(model: nn.Module, directory: Path, base: str) -> None:
    """Write the adapters of a model; `base`: the directory or name that the base is loaded from."""
    adapters = adapted_linears(model)
    if not adapters:
        raise CheckpointError("the model has no adapters to save; attach some, or separate its low-rank parts")
    pairs = {name: (module.lora_a.detach(), module.lora_b.detach()) for name, module in adapters.items()}
    _write(directory, pairs, base, fingerprint(model))


def load(model: nn.Module, directory: Path) -> int:
    """Put saved adapters beside the packed linears that they were made for, in place; returns their number.

    Raises CheckpointError for adapters of another base, or a kind that we do not have.
    """
    pairs, base = _read(directory)
    if base is not None and base != fingerprint(model):
        raise CheckpointError(f"{directory} was trained on another base; load the packed model it was made for")
    layers = _packed_targets(model)
    for name, (a, b) in pairs.items():
        layer = layers.get(name)
        if layer is None:
            raise CheckpointError(f"{directory} adapts {name}, which is no packed linear of this model; load its base")
        if (b.shape[0], a.shape[1]) != layer.shape:
            shape = (b.shape[0], a.shape[1])
            raise CheckpointError(f"{directory} adapts {name} of shape {shape}, but here it is {layer.shape}")
        if layer.lowrank is not None:
            raise CheckpointError(f"{name} has a low-rank part of its own; load the base that the adapter came with")
    for name, (a, b) in pairs.items():
        model.set_submodule(name, Adapted(layers[name], a, b))
    return len(pairs)


def fingerprint(model: nn.Module) -> str:
    """Return a sha256 of how a model's packed linears are stored and of samples of their bytes, without adapters."""
    inner = {name: module.base_layer for name, module in adapted_linears(model).items()}
    layers = {**_packed_targets(model), **inner}
    return _digest((name, layer.packed()) for name, layer in sorted(layers.items()))


def export(checkpoint: Path, out: Path, adapter: Path) -> int:
    """Split a packed checkpoint into its base without the low-rank parts, and an adapter; returns their number.

    Tensors pass through one by one. Raises OutputError where something is in the way.
    """
    for path in (out, adapter):
        if path.exists():
            raise OutputError(f"{path} exists already; give another directory")
    source = open_checkpoint(checkpoint)
    packed = source.config.get("quantization_config")
    if not isinstance(packed, dict) or packed.get("quant_method") != hf.METHOD:
        raise CheckpointError(f"{checkpoint} is not a packed checkpoint; there is nothing to take out of it")
    config = hf.CompressConfig.read(packed)
    stored = {name: hf.scheme(config, name) for name in config.modules}
    parts = [name for name, form in stored.items() if form.lowrank is not None]
    if not parts:
        raise CheckpointError(f"{checkpoint} has no low-rank parts; `attach` makes new adapters on it as it is")
    out.mkdir(parents=True)
    taken = {f"{name}.{lowrank.PREFIX}{key}" for name in parts for key in ("a", "b", "a_scales", "b_scales")}
    for file in source.files:
        kept = {name: tensor for name, tensor in read_header(file).items() if name not in taken}
        if kept:
            write_shard(out / file.name, kept)
    companion_files.write_index(out)
    companion_files.copy_files(source.directory, out)
    if (checkpoint / RECIPE).is_file():
        files.copy(checkpoint / RECIPE, out / RECIPE)
    bare = hf.build_config({name: dataclasses.replace(form, lowrank=None) for name, form in stored.items()})
    written = json_text.add_notice({**source.config, "quantization_config": bare.to_dict()})
    write_text(out / CONFIG, json.dumps(written, indent=2) + "\n")

    pairs, seen = {}, []
    for name, weight in _stored_weights(checkpoint):
        seen.append((name, _without_part(weight)))
        if weight.stored.lowrank is not None:
            pairs[name] = factors(weight)
    _write(adapter, pairs, str(out), _digest(seen))
    return len(pairs)


def _stored_weights(checkpoint: Path) -> Iterator[tuple[str, PackedWeight]]:
    """Yield the packed linears of a checkpoint, one block in memory at a time."""
    skeleton = Skeleton(open_checkpoint(checkpoint))
    for index in range(len(skeleton.blocks)):
        block = skeleton.load_block(index, torch.device("cpu"))
        for name, module in block.named_modules():
            if isinstance(module, PackedLinear):
                yield skeleton.block_prefix(index) + name, module.packed()
        skeleton.free()


def _packed_targets(model: nn.Module) -> dict[str, PackedLinear]:
    """Return the packed linears that have no adapter, by name."""
    inner = {id(module.base_layer) for module in adapted_linears(model).values()}
    named = model.named_modules()
    return {name: module for name, module in named if isinstance(module, PackedLinear) and id(module) not in inner}


def _without_part(weight: PackedWeight) -> PackedWeight:
    kept = {name: tensor for name, tensor in weight.tensors.items() if not name.startswith(lowrank.PREFIX)}
    return PackedWeight(dataclasses.replace(weight.stored, lowrank=None), kept, weight.shape)


def _digest(weights: Iterable[tuple[str, PackedWeight]]) -> str:
    """Return a sha256 of all these weights, in the order of their names; low-rank parts do not count."""
    digests = {}
    for name, weight in weights:
        digest = hashlib.sha256(f"{weight.format} {weight.params} {weight.shape} {weight.stored.ops}".encode())
        for key, tensor in sorted(_without_part(weight).tensors.items()):
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(torch.cat((flat[:SAMPLED], flat[-SAMPLED:])).numpy().tobytes())
        digests[name] = digest.hexdigest()
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def _write(directory: Path, pairs: Mapping[str, Factors], base: str, base_fingerprint: str) -> None:
    ranks = {name: a.shape[0] for name, (a, _) in pairs.items()}
    common = Counter(ranks.values()).most_common(1)[0][0]
    pattern = {name: rank for name, rank in ranks.items() if rank != common}
    config = {
        **REFUSED,
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "target_modules": sorted(pairs),
        "r": common,
        "lora_alpha": common,  # scaling is lora_alpha / r
        "rank_pattern": pattern,
        "alpha_pattern": pattern,
        "use_rslora": False,
        "lora_dropout": 0.0,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    tensors: dict[str, Tensor] = {}
    for name, (a, b) in pairs.items():
        tensors[f"{ADAPTED_PREFIX}{name}.lora_A.weight"] = a.cpu().contiguous()
        tensors[f"{ADAPTED_PREFIX}{name}.lora_B.weight"] = b.cpu().contiguous()
    directory.mkdir(parents=True, exist_ok=True)
    write_shard(directory / WEIGHTS_FILE, tensors, metadata={FINGERPRINT: base_fingerprint})
    write_text(directory / CONFIG_FILE, json.dumps(config, indent=2) + "\n")


def _read(directory: Path) -> tuple[dict[str, Factors], str | None]:
    """Read the adapters of a directory, B times its scaling, and the fingerprint of their base if it is there."""
    config = read_json(directory / CONFIG_FILE)
    if wrong := json_text.mismatch(config, {"alpha_pattern": json_text.Maybe({str: json_text.NUMBER}, is_new=True)}):
        raise CheckpointError(f"{directory / CONFIG_FILE} is damaged ({wrong}); save the adapter again")
    unlike = sorted(key for key, value in REFUSED.items() if config.get(key, value) != value)
    if config.get("peft_type") != "LORA" or unlike:
        raise CheckpointError(f"{directory} is no plain LoRA adapter ({unlike or config.get('peft_type')})")
    tensors: dict[str, Tensor] = {}
    try:
        open_regular(directory / WEIGHTS_FILE).close()
        with safe_open(directory / WEIGHTS_FILE, "pt") as file:
            base = (file.metadata() or {}).get(FINGERPRINT)
            for key in file.keys():  # noqa: SIM118 (not a dict)
                tensors[key.removeprefix(ADAPTED_PREFIX)] = file.get_tensor(key).float()
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{directory / WEIGHTS_FILE} cannot be read; save the adapter again") from error
    names = {key.rsplit(".lora_", 1)[0] for key in tensors}
    if set(tensors) != {f"{name}.lora_{side}.weight" for name in names for side in "AB"}:
        raise CheckpointError(f"{directory / WEIGHTS_FILE} holds more than pairs of lora_A and lora_B; not supported")
    pairs = {}
    for name in sorted(names):
        a, b = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
            shapes = f"lora_A {list(a.shape)} and lora_B {list(b.shape)}"
            raise CheckpointError(f"{directory / WEIGHTS_FILE}: {name} has {shapes}, no pair; save the adapter again")
        alpha = _pattern(config, "alpha_pattern", name) or config.get("lora_alpha", a.shape[0])
        if type(alpha) not in (int, float) or not math.isfinite(alpha):
            raise CheckpointError(f"{directory / CONFIG_FILE}: lora_alpha {shown(alpha)} of {name} is no number")
        pairs[name] = a, b * (alpha / (a.shape[0] ** 0.5 if config.get("use_rslora") else a.shape[0]))
    return pairs, base


def _pattern(config: Mapping[str, Any], key: str, name: str) -> float | None:
    """Return a linear's value in a pattern of the configuration: its keys are regular expressions for ends of names."""
    for pattern, value in (config.get(key) or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", name):
            return float(value)
    return None
