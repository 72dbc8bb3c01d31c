"""Callbacks for frameworks with a training loop of their own, each in a module of its name."""
