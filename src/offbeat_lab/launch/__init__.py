"""Ways to run the workers of a job: local processes, shaped links, torchrun, the simulator."""
