"""Soak: random faults over real processes, judged by the promises of the documentation.

``python -m benchmarks.soak --seed 1 --minutes 20`` plans faults from the seed (``plan``), starts
workers that train a model of constants (``worker``, ``model``), injects the faults (``faults``),
and compares the workers' reports with docs/failures.md (``policy``). Training ends with each fault;
``benchmarks.launched.soak`` injects faults into elastic training.

Layers, from the bottom up: ``plan``; ``records``, ``model``; ``worker``; ``processes``; ``faults``;
``runner``; ``policy``; ``soak``.
"""
