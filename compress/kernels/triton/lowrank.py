"""Multiply with the `lowrank` format on a GPU: two thin products of PyTorch, which need no kernel of ours."""

from compress.kernels.cpu.lowrank import prepare

__all__ = ["prepare"]
