"""Opening a communicator through a custom transport."""

from typing import Any

import pytest

from offbeat.errors import AttachError
from offbeat.transport.connect import open_communicator
from offbeat.transport.single_process import SingleCommunicator


class Custom:
    """A transport that returns the given object."""

    def __init__(self, made: Any) -> None:
        self.made = made

    def make_communicator(self, timeout_seconds: float) -> Any:
        return self.made


def test_a_transport_must_return_a_communicator() -> None:
    with pytest.raises(TypeError, match="must return a Communicator, got 3"):
        open_communicator(Custom(3), 5.0, what="a test")


def test_elastic_training_needs_a_membership() -> None:
    with pytest.raises(AttachError, match="a test with min_workers: a SingleCommunicator has no"):
        open_communicator(Custom(SingleCommunicator()), 5.0, what="a test", elastic=True)
