"""Attention strategies: how a forward's queries meet the blocks. `gather` is the reference."""
