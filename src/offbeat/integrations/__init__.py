"""Callbacks for training frameworks, each in a module named after the framework."""
