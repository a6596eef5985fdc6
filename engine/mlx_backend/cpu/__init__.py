"""For CPUs alone: a BLAS, and the attention `cascade` in place of `gather`."""
