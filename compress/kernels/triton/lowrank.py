"""The `lowrank` format on a GPU: two thin products, by PyTorch's own operators, which need no kernel of ours."""

from compress.kernels.cpu.lowrank import TYPES, matmul, most_rows, supports

__all__ = ["TYPES", "matmul", "most_rows", "supports"]
