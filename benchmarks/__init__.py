"""Benchmarks: what Offbeat costs, each figure a ratio measured in one run."""
