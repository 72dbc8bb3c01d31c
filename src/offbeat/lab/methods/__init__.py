"""Methods that a run can train with: strategies of this package, and baselines to compare with.

Baselines are the ideal network (``lab/ideal.py``) and *peers*: methods of torch and other packages,
which run their own code. Packages other than torch are in the extra ``peers``.
"""
