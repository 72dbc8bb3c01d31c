"""Checks of what the user does.

- ``compatibility``: the arguments of ``attach``, before anything is sent.
- ``same_setup``: all workers have equal settings, optimizers and shapes when training begins.
- ``same_tensors``: which tensors differ between the workers at a consensus and at the end.
- ``loading``: no values are loaded into an attached model outside of a consensus.
- ``unfinished``: training ends with ``finish``.
"""
