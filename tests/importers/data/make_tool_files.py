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

import numpy as np
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


def mlx() -> Iterator[Case]:
    """mx.quantize packs, mx.dequantize decodes; affine weights with scales and biases in float32, rounded once."""
    import mlx.core as mx

    def array(tensor: Tensor) -> Any:
        return mx.array(tensor.float().numpy())

    def tensor(value: Any) -> Tensor:
        return torch.from_numpy(np.array(value if "uint" in str(value.dtype) else value.astype(mx.float32)))

    for bits, dtype in (
        (2, "float16"),
        (3, "bfloat16"),
        (4, "float16"),
        (5, "float16"),
        (6, "bfloat16"),
        (8, "float16"),
    ):
        weight = array(normal(OUT, 128)).astype(getattr(mx, dtype))
        words, *parts = mx.quantize(weight, group_size=64, bits=bits)
        plain = mx.dequantize(words, *(part.astype(mx.float32) for part in parts), group_size=64, bits=bits)
        kind = getattr(torch, dtype)
        stored = {"weight": tensor(words), "scales": tensor(parts[0]).to(kind), "biases": tensor(parts[1]).to(kind)}
        yield f"affine{bits}", {"group_size": 64, "bits": bits}, stored, tensor(plain).to(kind)
    for mode, bits, group, largest in (
        ("mxfp4", 4, 32, 0),
        ("nvfp4", 4, 16, 0),
        ("nvfp4", 4, 16, 1),
        ("mxfp8", 8, 32, 0),
    ):
        weight = array(normal(OUT, IN)).astype(mx.bfloat16)
        given = {"group_size": group, "bits": bits, "mode": mode}
        scale = {"global_scale": mx.max(mx.abs(weight)).astype(mx.float32)} if largest else {}
        words, scales = mx.quantize(weight, **given, **scale)[:2]
        plain = tensor(mx.dequantize(words, scales, **given, **scale, dtype=mx.bfloat16)).bfloat16()
        stored = {"weight": tensor(words), "scales": tensor(scales), **{key: tensor(one) for key, one in scale.items()}}
        yield f"{mode}{'_scaled' * largest}", given, stored, plain
    words, *parts = mx.quantize(array(normal(OUT, IN)).astype(mx.float16), group_size=32, bits=4)
    plain = mx.dequantize(words, *(part.astype(mx.float32) for part in parts), group_size=32, bits=4)
    stored = {"weight": tensor(words), "scales": tensor(parts[0]).half(), "biases": tensor(parts[1]).half()}
    other = {"model.layers.0.self_attn.q_proj": {"group_size": 32, "bits": 4}}
    yield "mixed", {"group_size": 64, "bits": 8, "mode": "affine", **other}, stored, tensor(plain).half()


def quark() -> Iterator[Case]:
    """Its own packing and its quantizers of stored weights."""
    from quark.torch.export.nn.modules.realquantizer import get_real_quantizer
    from quark.torch.quantization.config.config import QTensorConfig
    from quark.torch.quantization.config.type import Dtype, QSchemeType, RoundType, ScaleType
    from quark.torch.quantization.observer.observer import (
        PerBlock2DMinMaxObserver,
        PerChannelMinMaxObserver,
        PerGroupMinMaxObserver,
        PerTensorMinMaxObserver,
    )
    from quark.torch.utils.pack import create_pack_method

    def config(dtype: str, qscheme: str, **given: Any) -> Any:
        fixed = {"is_dynamic": False, "scale_type": ScaleType.float, "round_method": RoundType.half_even}
        cls = {"per_group": PerGroupMinMaxObserver, "per_channel": PerChannelMinMaxObserver}
        cls |= {"per_tensor": PerTensorMinMaxObserver, "per_block": PerBlock2DMinMaxObserver}
        given = {"symmetric": True, "observer_cls": cls[qscheme], **fixed, **given}
        return QTensorConfig(dtype=Dtype(dtype), qscheme=QSchemeType(qscheme), **given)

    for dtype in ("int4", "uint4", "uint2", "int8"):
        for scheme, order in (("per_group", "reorder"), ("per_group", "order"), ("per_channel", "reorder")):
            if order == "order" and dtype in ("uint2", "int8") or (dtype == "uint2" and scheme == "per_channel"):
                continue
            bits = int(dtype[-1])
            low = 0 if dtype[0] == "u" else -(2 ** (bits - 1))
            codes = torch.randint(low, low + 2**bits, (OUT, IN), generator=torch.Generator().manual_seed(bits))
            groups = IN // GROUP if scheme == "per_group" else 1
            scale = normal(OUT, groups).abs().bfloat16() / 8
            zero = (
                torch.randint(low, low + 2**bits, (OUT, groups)) if dtype[0] == "u" else torch.zeros(OUT, groups).long()
            )
            extra = {"ch_axis": 1, "group_size": GROUP} if scheme == "per_group" else {"ch_axis": 0}
            spec = config(dtype, scheme, symmetric=dtype[0] != "u", **extra)
            method = create_pack_method(scheme, dtype)
            if scheme == "per_channel":
                scale, zero = scale[:, 0], zero[:, 0]
            packed = method.pack(codes.int(), order == "reorder")
            point = method.pack(zero.int(), order == "reorder")
            kept = scale.t().contiguous() if scheme == "per_group" else scale
            quantizer = get_real_quantizer(
                spec, None, order == "reorder", True, torch.bfloat16, torch.device("cpu"), kept.shape, point.shape
            )
            quantizer.scale.data, quantizer.zero_point.data = kept, point
            stored = {"weight": packed, "weight_scale": kept, "weight_zero_point": point}
            yield f"{dtype}_{scheme}_{order}", quark_settings(spec, order), stored, quantizer(packed).bfloat16()
    yield from quark_floats(config)


def quark_floats(config: Any) -> Iterator[Case]:
    from quark.torch.export.nn.modules.realquantizer import get_real_quantizer
    from quark.torch.utils.pack import create_pack_method

    cpu, weight = torch.device("cpu"), normal(OUT, IN)
    eight = (weight * 40).to(torch.float8_e4m3fn)
    four = create_pack_method("per_group", "fp4").pack((weight * 2).clamp(-6, 6).round(), False)
    bytes_ = torch.randint(118, 126, (OUT, IN // GROUP), dtype=torch.uint8)
    group = {"ch_axis": -1, "group_size": GROUP}
    forms: list[tuple[str, Any, Tensor, dict[str, Tensor]]] = [
        ("fp8", config("fp8_e4m3", "per_tensor"), eight, {"": torch.tensor(0.0123)}),
        ("fp8_rows", config("fp8_e4m3", "per_channel", ch_axis=0), eight, {"": weight.abs().amax(1) / 448}),
        ("fp8_blocks", config("fp8_e4m3", "per_block", block_size=[16, 32]), eight, {"": normal(2, 2).abs() / 9}),
        ("fp4_exponents", config("fp4", "per_group", scale_format="e8m0", **group), four, {"": bytes_}),
        (
            "fp4_twice",
            [
                config("fp4", "per_group", ch_axis=-1, group_size=16),
                config("fp8_e4m3", "per_tensor", is_scale_quant=True),
            ],
            four,
            {"": (normal(OUT, IN // 16).abs() * 99).to(torch.float8_e4m3fn), "_2": torch.tensor(0.0037)},
        ),
    ]
    for name, spec, packed, scales in forms:
        shapes = [scale.shape for scale in scales.values()]
        given = (True, True, torch.bfloat16, cpu)
        quantizer = get_real_quantizer(spec, None, *given, shapes if isinstance(spec, list) else shapes[0])
        for part, scale in zip(quantizer if isinstance(spec, list) else [quantizer], scales.values(), strict=True):
            part.scale.data = scale
        stored = {"weight": packed, **{f"weight_scale{key}": scale for key, scale in scales.items()}}
        yield name, quark_settings(spec), stored, quantizer(packed).bfloat16()


def quark_settings(spec: Any, order: str = "reorder") -> dict[str, Any]:
    weight = [one.to_dict() for one in spec] if isinstance(spec, list) else spec.to_dict()
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": None},
        "export": {"pack_method": order, "weight_format": "real_quantized"},
    }


def modelopt() -> Iterator[Case]:
    """Its own packing. Weights of scaled inputs have no reader there: their formula, written out."""
    from modelopt.torch.export.quant_utils import pack_int4_in_uint8
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    weight, scales, inputs = normal(OUT, IN), normal(OUT, IN // GROUP).abs() / 3 + 0.1, normal(IN).abs() + 0.5
    integers = (weight / scales.repeat_interleave(GROUP, 1)).round().clamp(-8, 7) + 0.0  # no -0.0
    packed, plain = pack_int4_in_uint8(weight, scales, GROUP), integers * scales.repeat_interleave(GROUP, 1)
    stored = {"weight": packed, "weight_scale": scales, "pre_quant_scale": inputs}
    settings = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": GROUP}
    yield "int4", settings, stored, (plain * inputs).bfloat16()
    second = {"weight_scale_2": torch.tensor(0.01), "input_scale": torch.tensor(0.1)}
    yield "int4_float8", {**settings, "quant_algo": "W4A8_AWQ"}, {**stored, **second}, (plain * inputs).bfloat16()
    rows = weight.abs().amax(1) / 127
    eight = (weight / rows[:, None]).round().to(torch.int8)
    stored = {"weight": eight, "weight_scale": rows}
    settings = {"quant_method": "modelopt", "quant_algo": "W8A16"}
    yield "int8", settings, stored, (eight.float() * rows[:, None]).bfloat16()
    settings = {**settings, "quant_algo": "W8A8_SQ_PER_CHANNEL"}
    stored |= {"pre_quant_scale": inputs, "input_scale": torch.tensor(0.1)}
    yield "int8_scaled", settings, stored, (eight.float() * rows[:, None] * inputs).bfloat16()
    four, scale, factor = NVFP4QTensor.quantize(weight, 16)
    plain = four.dequantize(torch.float32, scale=scale, double_scale=factor, block_sizes={-1: 16})
    stored = {"weight": four._quantized_data, "weight_scale": scale, "weight_scale_2": factor}
    stored |= {"pre_quant_scale": inputs, "input_scale": torch.tensor(0.1)}
    yield "nvfp4_awq", {**settings, "quant_algo": "NVFP4_AWQ"}, stored, (plain * inputs).bfloat16()
    stored |= {"svdquant_lora_a": normal(4, IN, seed=1), "svdquant_lora_b": normal(OUT, 4, seed=2)}
    whole = plain + stored["svdquant_lora_b"] @ stored["svdquant_lora_a"]
    yield "nvfp4_svd", {**settings, "quant_algo": "NVFP4_SVD"}, stored, (whole * inputs).bfloat16()


def gemma() -> Iterator[Case]:
    """The layers of transformers."""
    from transformers.integrations.gemma_quant import QuantizedLinear

    for bits, dtype in ((2, torch.uint8), (4, torch.uint8), (8, torch.int8)):
        layer = QuantizedLinear(IN, OUT, num_bits=bits)
        low, high = (-128, 128) if bits == 8 else (0, 256)
        layer.weight.data = torch.randint(low, high, layer.weight.shape).to(dtype)
        layer.weight_scale.data = normal(OUT, 1).abs()
        forms = {
            "num_bits": 4,
            "module_quant_configs": {"k_proj": {"num_bits": 8}, r"layers\.\d+": {"num_bits": bits}},
        }
        yield (
            f"int{bits}",
            {"quant_method": "gemma", **forms},
            layer.state_dict(),
            layer._dequantize_weights(torch.bfloat16),
        )


def hqq() -> Iterator[Case]:
    """Its own linears, in the state that transformers writes."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    for bits, axis, group in ((8, 1, 32), (4, 1, 32), (4, 0, 32), (3, 1, 32), (3, 0, 32), (2, 1, 16), (1, 0, 32)):
        linear = torch.nn.Linear(IN, OUT, bias=False)
        linear.weight.data = normal(OUT, IN).half()
        config = BaseQuantizeConfig(nbits=bits, group_size=group, axis=axis, view_as_float=bits == 2)
        layer = HQQLinear(linear, config, compute_dtype=torch.float16, device="cpu")
        settings = {"quant_method": "hqq", "quant_config": {"weight_quant_params": config["weight_quant_params"]}}
        stored = {name: value for name, value in layer.state_dict().items() if isinstance(value, Tensor)}
        yield f"int{bits}_axis{axis}", settings, stored, layer.dequantize()


def aqlm() -> Iterator[Case]:
    """Its own reader of random codes."""
    from aqlm.utils import _dequantize_weight, pack_int_data, unpack_int_data

    for books, bits, rows, columns in ((2, 8, 1, 8), (1, 9, 1, 8), (1, 6, 2, 4)):
        shape = (OUT // rows, IN // columns, books)
        codes = pack_int_data(torch.randint(0, 2**bits, shape), bits)
        tables, scales = normal(books, 2**bits, rows, columns).half(), normal(OUT // rows, 1, 1, 1).abs().half()
        plain = _dequantize_weight(unpack_int_data(codes, bits), tables, scales)
        sizes = {"in_group_size": columns, "out_group_size": rows, "num_codebooks": books, "nbits_per_codebook": bits}
        yield (
            f"{books}x{bits}",
            {"quant_method": "aqlm", **sizes},
            {"codes": codes, "codebooks": tables, "scales": scales},
            plain,
        )


def vptq() -> Iterator[Case]:
    """Its own layers of random indices, decoded by its code for a CPU."""
    from vptq.layers.vqlinear import VQuantLinear
    from vptq.ops.quant_gemm import dequant

    forms = (("packed", True, 16, 8), ("plain", False, -1, 0), ("alone", True, -1, 0))
    for name, packed, residuals, outliers in forms:
        form: dict[str, Any] = {
            "vector_lens": [4 if outliers else -1, 6],
            "num_centroids": [8 if outliers else -1, 32],
            "num_res_centroids": [-1, residuals],
            "group_num": 2,
            "group_size": (IN - outliers) // 2,
            "outlier_size": outliers,
            "indices_as_float": False,
            "enable_norm": True,
            "enable_perm": True,
            "is_indice_packed": packed,
            "in_features": IN,
            "out_features": OUT,
            "bias": False,
        }
        layer = VQuantLinear(**form, vector_quant_dim="out", device="cpu", dtype=torch.float16)
        for key, value in layer.state_dict().items():
            high = {"outlier_indices": 8, "res_indices": 16, "indices": 32}.get(key, 0)
            if key == "perm":
                value.copy_(torch.randperm(IN))
            elif value.dtype == torch.int32:
                value.copy_(torch.randint(-(2**31), 2**31, value.shape))
            else:
                value.copy_(torch.randint(0, high, value.shape) if high else normal(*value.shape))
        if not packed:
            layer.perm.data = layer.perm.data.to(torch.int16)
        tables = layer.centroids.weight.view(2, 32, 6)
        plain = dequant(
            layer.indices,
            tables,
            layer.outlier_indices,
            layer.outlier_centroids and layer.outlier_centroids.weight,
            layer.res_indices,
            layer.res_centroids and layer.res_centroids.weight,
            layer.perm,
            layer.weight_scale,
            layer.weight_bias,
            packed,
            outliers > 0,
            residuals > 0,
            True,
            True,
            32,
            8,
            residuals,
            layer.padding,
            layer.outlier_padding,
            2,
            form["group_size"],
            outliers,
            6,
            form["vector_lens"][0],
        )
        layers = {"model.layers.0.self_attn.q_proj": form}
        yield name, {"quant_method": "vptq", "config_for_layers": layers}, layer.state_dict(), plain


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
