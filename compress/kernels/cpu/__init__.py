"""Kernels for CPUs: compiled at run time (compress/kernels/llvm.py), or PyTorch's own operators."""
