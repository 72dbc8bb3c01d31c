"""Methods that a run can train with: strategies of this package, and references to compare with.

References are ``ideal`` (BSP timed without communication, in ``ideal.py``) and *peers*: methods
of torch, which run its code.
"""
