"""Moves bytes; knows extents, rows and dtypes, no models."""
