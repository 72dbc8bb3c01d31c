"""Checks of what the user does: before training, between workers, and at its end."""
