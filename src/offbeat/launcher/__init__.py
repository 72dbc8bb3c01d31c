"""Processes of workers on this machine, and the launcher ``offbeat run``, which restarts them."""
