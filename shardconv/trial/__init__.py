"""Runs the loader on CPU ranks: `shardconv check` and `shardconv demo`."""
