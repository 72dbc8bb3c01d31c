"""Reduced precision of messages between workers."""
