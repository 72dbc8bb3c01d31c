"""Costs: time, memory and bytes of single mechanisms, as ratios measured in one run."""
