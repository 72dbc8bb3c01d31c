"""Algorithms to compare with, at the settings of their papers; see docs/choosing.md."""
