"""Elastic training: workers that fail or join while the others continue."""
