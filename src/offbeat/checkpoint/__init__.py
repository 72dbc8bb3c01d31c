"""Checkpoints: saving and loading the state of a training run."""
