"""Processes that hold a model in one tool and measure steps of it when asked (benchmarks/speed_peers.py)."""
