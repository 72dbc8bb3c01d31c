"""Elastic training under ``offbeat run``: random faults, availability, and starts.

``soak`` injects faults, whose logs ``judge`` compares with a replay, and ``availability`` kills one
worker after the other. Both start launchers (``training``), whose workers run ``script`` and log
every batch. ``start`` measures how long workers take to start.
"""
