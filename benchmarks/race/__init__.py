"""The comparisons that the pages quote.

Layers, from the bottom up: ``studies`` says what is run, and ``run`` runs it; ``slowdown`` and
``tables`` read the results; ``figures`` and ``evidence`` turn them into a page.
"""
