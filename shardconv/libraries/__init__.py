"""What must be known of a model library: its classes, skeletons, own plans and rules for dtypes."""
