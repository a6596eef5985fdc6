"""What a model says: an answer's parts as items, and as events."""
