"""Durations of training steps: measurement, padding to a given duration, and time limits."""
