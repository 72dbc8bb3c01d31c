"""Models of the recipes."""
