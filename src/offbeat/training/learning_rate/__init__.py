"""Factors on learning rates inside ``optimizer.step()``."""
