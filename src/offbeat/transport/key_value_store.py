"""A small key-value store that all workers share.

Keys and values are texts. A key that was never written has the value "". All operations are atomic,
and the operations of one worker take effect in their order.
"""

from typing import Protocol


class KeyValueStore(Protocol):
    """Interface of a store. All methods but ``put`` wait for an answer, usually one round trip.

    They raise a RuntimeError if the store does not answer.
    """

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the integer under ``key`` (at first 0), and return the sum."""

    def compare_set(self, key: str, expected: str, value: str) -> str:
        """Write ``value`` if the key has the value ``expected``.

        Returns the value of the key afterwards. Never expect a value other than "" of a key that
        may not have been written.
        """

    def get(self, key: str) -> str:
        """Return the value of ``key``."""

    def put(self, key: str, value: str) -> None:
        """Write a value. May return before the write has taken effect."""
