"""What the server and the engine say to each other. Frozen values, no behaviour, no MLX."""
