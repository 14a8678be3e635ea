"""Kernels for formats of published methods that are not on the frontier, by devices: compress/kernels/contract.py."""
