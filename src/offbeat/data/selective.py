"""Placeholder."""


class SelDPSampler:
    """Placeholder."""
