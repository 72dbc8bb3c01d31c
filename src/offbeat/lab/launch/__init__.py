"""Where and how a job's workers run: processes, shaped links, launchers, virtual time."""
