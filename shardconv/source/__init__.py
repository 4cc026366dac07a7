"""What is converted: where it is, what it holds, and what of it is refused."""
