"""Learning rates: schedules, and factors inside ``optimizer.step()``."""
