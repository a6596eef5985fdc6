"""What a sequence's tokens may be: grammars, forced tokens, and the masks of a batch."""
