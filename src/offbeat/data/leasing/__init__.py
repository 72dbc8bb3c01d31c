"""Leases: workers take the samples of an epoch in chunks, each as fast as it can."""
