"""Kernels for CPUs: compiled at run time (compress/jit.py), or PyTorch's own operators."""
