"""The ablation of streaming averaging: ``python -m benchmarks.ablation``."""
