"""The ranks that share a model, and how they agree."""
