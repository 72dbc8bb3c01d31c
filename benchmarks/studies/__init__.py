"""Studies: trainings in virtual time that compare strategies and settings, each with a page."""
