"""Nodes: groups of workers with fast links, which average their gradients in every step."""
