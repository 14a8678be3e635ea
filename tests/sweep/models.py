"""Build and save a tiny random model of an architecture, and count the weights of its linears.

    built = build("mixtral", Path("out/base"), tokenizer)      # Built(kind="MixtralForCausalLM", linear=884736, ...)

The weights are random, and such that every part of a model counts: an error in one of them shows in the logits.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sweep.tables import SIZES, SPECIAL, UNDECLARED, VARIANTS, VOCABULARY, WRAPPERS

MOST_PARAMETERS = 40_000_000
TOWER = re.compile(r"image|vision|visual|audio|speech")  # in the names of parameters that no text reaches
NARROWEST = 16  # rows or columns of a matrix that counts
WITHOUT = {  # settings for which None says: without
    *("q_lora_rank", "sliding_window", "num_experts", "moe_intermediate_size", "attention_chunk_size", "chunk_size"),
    *("n_inner", "num_local_experts"),
}
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class UnbuildableError(Exception):
    """This program could not make the model."""


class Built(NamedTuple):
    """What was made."""

    kind: str  # class of the model
    parameters: int
    linear: int  # weights of the text model that products are made with
    elsewhere: int  # the same outside of the text model


def names() -> list[str]:
    """Return the names of all rows: architectures, variants, and vision-language models as vlm:NAME."""
    return [*sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), *VARIANTS, *(f"vlm:{name}" for name in WRAPPERS)]


def opener(name: str) -> Any:
    """Return the class of transformers that opens a row's model."""
    return AutoModelForImageTextToText if name.startswith("vlm:") else AutoModelForCausalLM


def load(name: str, directory: Path) -> PreTrainedModel:
    """Return the model of a row from a directory, in float32."""
    model: PreTrainedModel = opener(name).from_pretrained(directory, dtype=torch.float32)
    return model.eval()


def build(name: str, directory: Path, tokenizer: Path) -> Built:
    """Make the model of a row in bfloat16 and save it with a tokenizer. Raises UnbuildableError, and what it raises."""
    torch.manual_seed(0)
    config = configuration(name)
    with torch.device("meta"):
        size = sum(p.numel() for p in opener(name).from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise UnbuildableError(f"{size / 1e6:.0f}M parameters: the table of sizes misses something")
    model = opener(name).from_config(config, dtype=torch.float32).eval()
    if not changes(name).get("default_init"):
        enliven(model)
    fill(model)
    with torch.no_grad():
        logits = model(input_ids=torch.randint(5, VOCABULARY - 5, (2, 48))).logits
    if not torch.isfinite(logits).all():
        raise UnbuildableError("the random model itself gives logits that are not finite")
    linear, elsewhere = count(model)
    model.to(torch.bfloat16).save_pretrained(directory)
    for file in TOKENIZER:
        if (tokenizer / file).exists():
            shutil.copy(tokenizer / file, directory / file)
    return Built(type(model).__name__, size, linear, elsewhere)


def changes(name: str) -> dict[str, Any]:
    """Return what differs from the table of sizes for a row."""
    architecture, extra = VARIANTS.get(name, (name.removeprefix("vlm:"), {}))
    return {**SPECIAL.get(architecture, {}), **extra}


def configuration(name: str) -> Any:
    """Return the small configuration of a row."""
    architecture, _ = VARIANTS.get(name, (name.removeprefix("vlm:"), {}))
    if architecture not in CONFIG_MAPPING:
        raise UnbuildableError("not in the installed transformers")
    config = small(CONFIG_MAPPING[architecture], changes(name))
    text = config.get_text_config()
    for part in ("vision_config", "audio_config"):  # a tower projects to the width of the text model
        if hasattr(getattr(config, part, None), "out_hidden_size"):
            getattr(config, part).out_hidden_size = text.hidden_size
    if hasattr(config, "is_decoder") and not getattr(config, "is_encoder_decoder", False):
        config.is_decoder = True
    for key, value in UNDECLARED.get(architecture, {}).items():
        setattr(config, key, value)
    return config


def small(kind: Any, extra: dict[str, Any], depth: int = 0) -> Any:
    """Return a configuration of this class with the sizes of the table, those of its parts included."""
    defaults = kind()
    known = {**{k: v for k, v in vars(type(defaults)).items() if not k.startswith("_")}, **defaults.to_dict()}
    values = {name: value for name, value in sized(kind, known).items() if _is_free(kind, name, known[name])}
    for name, part in (getattr(kind, "sub_configs", None) or {}).items():
        current = getattr(defaults, name, None)
        wanted = (depth < 3 and current is not None) or name in ("text_config", "vision_config")
        chosen = type(current) if current is not None else part
        if wanted and kind.__name__ != "DbrxConfig" and chosen.__name__ != "AutoConfig":
            own = SPECIAL.get(getattr(chosen, "model_type", ""), {})
            values[name] = small(chosen, own, depth + 1).to_dict()
    values = {key: value for key, value in values.items() if not key.endswith("_token_id") or key in TOKENS}
    for key, value in known.items():  # tokens of images and the like must be in the vocabulary
        is_token = re.search(r"(token_id|token_index|_id)$", key) and type(value) is int
        if is_token and value >= VOCABULARY and key not in values:
            values[key] = 3 + len(key) % 50
    values |= {key: value for key, value in extra.items() if key in known or key in values}
    values = {key: value for key, value in values.items() if value is not None or key in extra}
    if "qk_rope_head_dim" in values and "head_dim" in values:
        values["head_dim"] = values["qk_rope_head_dim"]
        if "num_key_value_heads" in values and "kv_lora_rank" in values:  # latent attention: a key of every head
            values["num_key_value_heads"] = values.get("num_attention_heads", 4)
    return kind(**values)


def sized(kind: Any, known: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of the table that a configuration has, by its own names for them."""
    aliases = getattr(kind, "attribute_map", None) or {}
    standard = {target: key for key, target in aliases.items()}
    return {
        name: SIZES.get(standard.get(name, name), value)
        for name, value in SIZES.items()
        if name in known and name not in aliases  # an alias: set under the other name
    }


def _is_free(kind: Any, name: str, default: Any) -> bool:
    """Return whether a setting with this default may have another size."""
    if isinstance(default, (dict, list, tuple, bool)) or callable(default):
        return False
    if isinstance(getattr(kind, name, None), property) or (default is None and name in WITHOUT):
        return False
    return not (name == "sliding_window" and default in (0, -1))


@torch.no_grad()
def enliven(model: nn.Module) -> None:
    """Give weights that make every part count: products keep the size of their input, norms have weights of their own.

    With the default of 0.02 a narrow block adds next to nothing to the residual stream, and errors in it do not show.
    """
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.Linear) and "dt_proj" not in name:
            module.weight.normal_(0, module.in_features**-0.5)
        elif kind == "Conv1D":
            module.weight.normal_(0, module.weight.shape[0] ** -0.5)
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(0, 1)
        elif "Norm" in kind and getattr(module, "weight", None) is not None and module.weight.dim() == 1:
            module.weight.add_(0.2 * torch.randn_like(module.weight))
        for parameter in module.parameters(recurse=False):
            if parameter.dim() == 3 and not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
                parameter.normal_(0, 128**-0.5)


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Fill what the initialization leaves empty, and round everything to bfloat16."""
    for key, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise UnbuildableError(f"initialization leaves {key} not finite")
        if parameter.dim() >= 2 and float(parameter.abs().max()) == 0 and "embed" not in key:
            parameter.normal_(0, 0.02)
        parameter.copy_(parameter.to(torch.bfloat16).float())


def matrices(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights that products are made with, by name: no embeddings, heads, convolutions and routers."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    skipped = {id(p) for end in ends if end is not None for p in end.parameters()}  # and what is in already
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        if isinstance(module, (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)) or "Norm" in type(module).__name__:
            continue
        if re.search(r"(router|gate)$", name) and not is_linear:
            continue
        for key, parameter in module.named_parameters(recurse=False):
            is_wide = min(parameter.shape[-2:], default=0) >= NARROWEST
            is_matrix = parameter.dim() == 2 and key in ("weight", "w1", "w2", "v1")
            counts = (is_linear and key == "weight") or (is_wide and (parameter.dim() == 3 or is_matrix))
            if counts and id(parameter) not in skipped and parameter.dtype in FLOATS:
                found[f"{name}.{key}"] = parameter
                skipped.add(id(parameter))
    return found


def count(model: PreTrainedModel) -> tuple[int, int]:
    """Return the numbers in the matrices of the text model, and in the others: towers may be inside of the decoder."""
    decoder = model.get_decoder()
    whole = model if isinstance(decoder, nn.Linear) else decoder  # a class may call its head so
    text = {id(p) for name, p in whole.named_parameters() if not TOWER.search(name)}
    sizes = [(id(p) in text, p.numel()) for p in matrices(model).values()]
    return sum(n for inside, n in sizes if inside), sum(n for inside, n in sizes if not inside)


def packed(name: str, directory: Path, base: Path) -> int:
    """Return the numbers of the matrices that config.json lists as packed, by the shapes of the original model."""
    listed = json.loads((directory / "config.json").read_text()).get("quantization_config", {}).get("modules", {})
    with torch.device("meta"):
        model = opener(name).from_config(AutoConfig.from_pretrained(base))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    tables = {name for name, module in model.named_modules() if any(module is end for end in ends)}
    total = 0
    for module in (name for name in listed.keys() - tables if not TOWER.search(name)):
        if (weight := parameters.get(f"{module}.weight")) is not None:
            total += weight.numel()
            continue
        expert, _, part = module.rpartition(".")
        owner, is_down = expert.rpartition(".")[0], part == "down_proj"
        keys = ("down_proj",) if is_down else ("gate_up_proj", "up_proj")
        fused = next((parameters[f"{owner}.{key}"] for key in keys if f"{owner}.{key}" in parameters), None)
        if fused is not None:
            halves = 2 if not is_down and f"{owner}.gate_up_proj" in parameters else 1
            total += fused[0].numel() // halves
    return total
