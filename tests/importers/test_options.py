"""Options of other tools have the values that these tools give them; one without a meaning is refused by its name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from compress import plugins
from compress.errors import CheckpointError
from compress.importers import compressed_tensors, open_checkpoint, options

WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}
SOUND: dict[str, dict[str, Any]] = {
    "auto_round": {"bits": 4, "group_size": 32},
    "awq": {"bits": 4, "group_size": 32},
    "bitnet": {},
    "bitsandbytes": {"load_in_4bit": True},
    "compressed_tensors": {"config_groups": {"a": {"targets": ["Linear"], "weights": WEIGHTS}}},
    "exl3": {"bits": 4.0, "head_bits": 6},
    "fbgemm_fp8": {},
    "fp8": {},
    "gptq": {"bits": 4, "group_size": 32},
    "gemma": {},
    "mlx": {"bits": 4, "group_size": 32},
    "aqlm": {},
    "hqq": {},
    "vptq": {"config_for_layers": {}},
    "quark": {},
    "modelopt": {"quant_algo": "NVFP4"},
    "mxfp4": {},
    "paroquant": {"bits": 4, "group_size": 128, "krot": 8},
    "torchao": {"quant_type": {}},
}
SENSELESS = ("x", 7, -3.5, True, None, [], {}, ["x"], {"x": 1}, "", "INT", "4")


def written(folder: Path, settings: dict[str, Any]) -> Path:
    """A model without a quantized weight: options are refused before tensors are looked at."""
    config = {"model_type": "llama", "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.ones(2, 2)}, folder / "model.safetensors", {"a": json.dumps({"_type": "Tensor"})})
    return folder


def senseless() -> Iterator[tuple[str, str, Any]]:
    """Yield importers, options and values that these cannot have."""
    for name in plugins.names("importers"):
        importer = plugins.load("importers", name)
        assert importer.OPTIONS, name
        for key, allowed in importer.OPTIONS.items():
            yield from ((name, key, value) for value in SENSELESS if not options.is_allowed(value, allowed))


def test_every_importer_has_sound_settings(tmp_path: Path) -> None:
    assert set(SOUND) == set(plugins.names("importers"))
    for name, settings in SOUND.items():
        with pytest.raises(CheckpointError, match="no weight is stored so"):
            open_checkpoint(written(tmp_path, {"quant_method": name, **settings}))


def test_values_without_a_meaning_are_refused(tmp_path: Path) -> None:
    cases = list(senseless())
    assert len(cases) > 300
    for name, key, value in cases:
        changed = {"quant_method": name, **SOUND[name], key: value}
        with pytest.raises(CheckpointError) as raised:
            open_checkpoint(written(tmp_path, changed))
        line = str(raised.value)
        assert "no weight is stored so" not in line and "\n" not in line, (name, key, value)
        assert key in line or (key == "is_marlin_format" and "'marlin'" in line), line


@pytest.mark.parametrize("key", compressed_tensors.ARGUMENTS)
def test_values_of_groups_without_a_meaning_are_refused(key: str, tmp_path: Path) -> None:
    for value in SENSELESS:
        if not options.is_allowed(value, compressed_tensors.ARGUMENTS[key]):
            groups = {"a": {"targets": ["Linear"], "weights": {**WEIGHTS, key: value}}}
            with pytest.raises(CheckpointError, match=f"config_groups has {key} .*, which has no meaning here"):
                open_checkpoint(written(tmp_path, {"quant_method": "compressed-tensors", "config_groups": groups}))


def test_a_flag_is_no_number() -> None:
    assert options.is_allowed(4, (4,)) and not options.is_allowed(True, (1, int)) and not options.is_allowed(1, (bool,))
    assert options.is_allowed(4, (int,)) and not options.is_allowed(4.0, (4, int))
