"""The parts of a shared model: launched, in flight, landed."""
