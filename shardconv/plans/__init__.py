"""A plan for a model: what patterns name, how each parameter is cut, and whether that can be right."""
