"""Where files that are not here come from and go to."""
