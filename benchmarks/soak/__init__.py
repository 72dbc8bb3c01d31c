"""Random faults over real processes: whether training survives them as docs/survival.md says.

``python -m benchmarks.soak --seed 1 --minutes 20`` plans faults from the seed (``plan``), starts
workers that train a model of constants (``worker``, ``model``), breaks something (``faults``), and
holds what is left against what is documented (``policy``, ``continuing``).
"""
