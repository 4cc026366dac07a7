"""What stands on disk, as data: names, headers, plans, layouts, manifests. Moves no tensor data."""
