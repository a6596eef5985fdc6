"""What serves CPUs alone: a GPU has `attention/strategy.py`, and no BLAS."""
