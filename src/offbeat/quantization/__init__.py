"""Reduced precision of the messages between workers: codecs and sums with error feedback."""
