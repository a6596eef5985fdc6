"""Embeddings, and texts ranked against each other."""
