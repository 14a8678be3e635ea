"""Make tiny weights by other tools, and what these tools' own readers give for them: NAME.safetensors beside this file.

    python tests/importers/data/make_tool_files.py auto_round      # needs that tool; on a CPU

Each case has the tensors `case/name` that the tool stores for a linear, and `case/=`, which its reader makes of them.
The metadata have the settings that it writes. test_tool_files.py reads them without the tools.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Case = tuple[str, dict[str, Any], dict[str, Tensor], Tensor]  # name, settings, stored tensors, decoded weight
OUT, IN, GROUP = 32, 64, 32


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def on_grid(bits: int) -> tuple[torch.nn.Linear, Tensor, Tensor]:
    """A linear whose weight needs no rounding, and its scales and zeros [out, groups]."""
    groups = normal(OUT, IN).unflatten(1, (-1, GROUP))
    scale = ((groups.amax(-1) - groups.amin(-1)) / (2**bits - 1)).half()
    zero = (-groups.amin(-1) / scale.float()).round().clamp(1, 2**bits - 1)
    codes = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, 2**bits - 1)
    linear = torch.nn.Linear(IN, OUT, bias=False)
    linear.weight.data = ((codes - zero[..., None]) * scale.float()[..., None]).flatten(1)
    return linear, scale, zero


def auto_round() -> Iterator[Case]:
    """Its own layers pack, and decode: by a product with the identity, or by the method that they have for it."""
    from auto_round.export.export_to_awq.utils import WQLinear_GEMM, dequantize_gemm
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    config = {"quant_method": "auto-round", "data_type": "int", "group_size": GROUP, "sym": False}
    kinds = [("auto_round:auto_gptq", qlinear_torch_zp), ("auto_round", qlinear_torch)]
    for (layout, module), bits in ((kind, bits) for kind in kinds for bits in range(2, 9)):
        linear, scale, zero = on_grid(bits)
        layer = module.QuantLinear(bits, GROUP, IN, OUT, bias=False)
        layer.device = torch.device("cpu")
        layer.pack(linear, scale.float(), zero, None, device="cpu")
        settings = {**config, "bits": bits, "packing_format": layout}
        yield f"{layout.rpartition(':')[2]}_{bits}", settings, layer.state_dict(), layer(torch.eye(IN).half()).t()
    for bits in (4, 5, 6, 7):
        linear, scale, zero = on_grid(bits)
        layer = WQLinear_GEMM.from_linear(linear, bits, GROUP, scales=scale.float().t(), zeros=zero.t(), device="cpu")
        decoded = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, bits, GROUP).t()
        yield (
            f"awq_{bits}",
            {**config, "bits": bits, "packing_format": "auto_round:auto_awq"},
            layer.state_dict(),
            decoded,
        )
    linear, scale, zero = on_grid(4)  # one of other bits and groups than the rest
    layer = qlinear_torch.QuantLinear(4, GROUP, IN, OUT, bias=False, g_idx=True)
    layer.device = torch.device("cpu")
    layer.pack(linear, scale.float(), zero, None, device="cpu")
    mixed = {"bits": 2, "group_size": 128, "extra_config": {".*q_proj.*": {"bits": 4, "group_size": GROUP}}}
    settings = {**config, **mixed, "packing_format": "auto_round:gptqmodel"}
    yield "mixed", settings, layer.state_dict(), layer(torch.eye(IN).half()).t()
    yield from auto_round_floats(config)


def auto_round_floats(config: dict[str, Any]) -> Iterator[Case]:
    from auto_round.experimental import qmodules
    from auto_round.experimental.qmodules.fp8_static import WeightFP8ActFP8StaticQuantLinear
    from auto_round.export.export_to_autoround import qlinear_fp, qlinear_int
    from auto_round.schemes import QuantizationScheme

    linear = torch.nn.Linear(IN, OUT, bias=False)
    layer = WeightFP8ActFP8StaticQuantLinear(IN, OUT, None, dtype=torch.bfloat16)
    scale = (normal(OUT, IN).abs().amax(1) / 448).bfloat16()
    layer.weight.data, layer.weight_scale.data = (normal(OUT, IN) / scale[:, None]).to(torch.float8_e4m3fn), scale
    settings = {**config, "data_type": "fp", "bits": 8, "group_size": -1, "packing_format": "auto_round:fp8_static"}
    stored = {"weight": layer.weight, "weight_scale": scale, "input_scale": layer.input_scale}
    yield "fp8", settings, stored, layer.dequant_weight_online()
    linear.weight.data = normal(OUT, IN)
    for kind, bits, group in (
        ("mx_fp", 4, 32),
        ("mx_fp", 8, 32),
        ("mx_int", 4, 32),
        ("nv_fp", 4, 16),
        ("nvfp4_v2", 4, 16),
    ):
        packer = qlinear_int if kind == "mx_int" else qlinear_fp
        largest = linear.weight.data.unflatten(1, (-1, group)).abs().amax(-1)
        given = {"data_type": kind, "act_bits": 16, "act_data_type": kind, "sym": True}
        layer = packer.QuantLinear(bits, group, IN, OUT, False, **given)
        layer.act_bits, part = 16, {}
        if kind.startswith("mx"):
            scale = largest.log2().floor() - {4: 2, 8: 8}[bits] * (kind == "mx_fp")
        elif kind == "nv_fp":
            part = {"global_scale": 2688 / largest.max()}
            scale = (largest / 6 * part["global_scale"]).to(torch.float8_e4m3fn).float()
        else:
            scale = largest / 6
        layer.pack(linear, scale, device="cpu", **part)
        stored = {name: value for name, value in layer.state_dict().items() if not name.startswith("input")}
        scheme = QuantizationScheme(bits, group, data_type=kind, act_bits=bits, act_group_size=group)
        name = {"mx_fp": f"MXFP{bits}", "mx_int": "MXINT4", "nv_fp": "NVFP4", "nvfp4_v2": "NVFP4E5M3"}[kind]
        reader = getattr(qmodules, f"{name}QuantLinear")(IN, OUT, scheme, bias=None, dtype=torch.bfloat16)
        reader.load_state_dict(stored, strict=False)
        decoded = reader.dequant_weight_online().bfloat16()
        settings = {**config, "sym": True, "data_type": kind, "bits": bits, "group_size": group}
        layout = "auto_round:llm_compressor" + ("_nvfp4_e5m3" if kind == "nvfp4_v2" else "")
        yield f"{kind}{bits}", {**settings, "packing_format": layout}, stored, decoded


def main(tool: str) -> None:
    settings, tensors = {}, {}
    for case, section, stored, decoded in globals()[tool]():
        settings[case] = section
        for name, value in {**stored, "=": decoded}.items():
            tensors[f"{case}/{name}"] = value.detach().clone().contiguous()
    path = Path(__file__).with_name(f"{tool}.safetensors")
    save_file(tensors, path, {"settings": json.dumps(settings)})
    print(path.name, path.stat().st_size, *settings)


if __name__ == "__main__":
    main(sys.argv[1])
