"""Kernels for CPUs."""
