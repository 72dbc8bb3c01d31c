"""Callbacks for training frameworks. Each module has the name of its framework."""
