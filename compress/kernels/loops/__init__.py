"""Plain loops over numbers, written in Python and compiled by numba: no matrix products."""
