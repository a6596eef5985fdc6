"""What `/metrics` shows."""
