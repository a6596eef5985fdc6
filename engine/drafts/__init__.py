"""Speculative decoding without a draft model: sources of drafts, and which drafts pay. No MLX."""
