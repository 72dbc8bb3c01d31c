"""Elastic training under ``offbeat run``: random faults, availability and leaks.

``soak`` injects faults, and ``availability`` kills one worker after the other. Both start launchers
(``training``), whose workers run ``script`` and log every batch.
"""
