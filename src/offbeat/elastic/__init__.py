"""Elastic training: workers may be lost or join while the others continue.

From the start of a worker to a new generation: ``gathering`` begins a training or joins one,
``agreement`` decides who is in the next generation, ``membership`` opens it, and
``membership_changes`` gives its workers a common state. ``heartbeats`` tells which processes have
ended, and ``silence`` when a member that does not answer is given up. ``store`` is the key-value
store through which all of them agree. ``DESIGN.md`` has the reasons.
"""
