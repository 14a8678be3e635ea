"""Multiply packed weights on GPUs, in Triton. `<format>.py` is light and decides whether and how to run;
its kernels are in `_<format>.py`, imported at the first launch. Every kernel runs in Triton's interpreter too.
"""
