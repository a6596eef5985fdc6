"""The model over the arena: what its layers keep, and one forward through views of it."""
