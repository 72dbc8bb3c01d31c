"""Elastic training: workers may be lost or join while the others continue."""
