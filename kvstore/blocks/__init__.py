"""Block ids: the pool with their reference counts, and the block table of a sequence."""
