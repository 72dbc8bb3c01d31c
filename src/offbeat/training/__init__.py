"""The front door: ``attach`` puts a strategy on a training loop, and runs it from there."""
