"""The machine: its BLAS, its memory, its limits."""
