"""Constraints on generated tokens: grammars, forced tokens, and the masks of a batch."""
