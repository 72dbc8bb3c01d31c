"""Parts of a shared model: the groups of parameters that are averaged separately."""
