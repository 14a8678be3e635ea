"""Multiply packed weights on GPUs, in Triton: `<format>.py` decides how to run and holds its kernels.

Kernels that fill a file of their own are in `_<format>.py`. Files that hold kernels import triton:
compress/kernels/dispatch.py imports them where it is installed. Every kernel runs in Triton's interpreter too.
"""
