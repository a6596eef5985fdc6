"""The machine: its memory, and what MLX's allocator may take of it."""
