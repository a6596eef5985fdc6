"""How a forward's queries meet the blocks. The strategy `gather` is the reference."""
