"""Where a set appears: whole or not at all."""
