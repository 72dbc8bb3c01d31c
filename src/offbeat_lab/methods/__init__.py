"""Methods that a run can train with: strategies of this package, and baselines to compare with.

Baselines are ``ideal`` (BSP timed without communication, in ``ideal.py``) and *peers*: methods
of torch and other packages, which run their own code. ``pip install 'offbeat[peers]'`` installs
these packages.
"""
