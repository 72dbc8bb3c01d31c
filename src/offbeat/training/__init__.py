"""Hooks that run a strategy inside the user's PyTorch training loop."""
