"""From a path or a repo to the checked files of this rank."""
