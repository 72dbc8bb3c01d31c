"""Nodes: groups of workers, usually on one machine, that average gradients in every step."""
