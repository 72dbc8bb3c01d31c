"""Communication between workers: the communicator interface and its implementations.

``communicator`` starts operations, and ``future`` waits for them. ``host`` is the clock and the
threads of a worker. ``stages`` starts second stages in such threads. ``team`` is the group of
workers that the upper layers see. ``torch_backend`` implements the communicator over
``torch.distributed``: ``process_groups`` opens its connections, and ``connections`` handles the
first failure, for which ``liveness_check`` and ``exit_reasons`` find the cause.
"""
