"""The machine: files, paths, locks, memory. Knows nothing of models; imports nothing of ours but errors."""
