"""The modules of a sharded model."""
