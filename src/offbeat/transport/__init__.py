"""Communication between workers: the communicator interface and its implementations."""
