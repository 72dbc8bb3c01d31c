"""Training: hooks on the user's training loop, which run the strategy."""
