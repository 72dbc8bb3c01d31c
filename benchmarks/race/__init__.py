"""The race: every method against every other, on real processes and in virtual time.

Layers, from the bottom up: ``methods`` and ``settings`` say what is run; ``real`` and ``simulated``
run it; ``curves`` and ``simulated_results`` read the results; ``tables``, ``figures`` and
``evidence`` turn them into pages; ``command`` is the command line, ``python -m benchmarks race``.
"""
