"""The values that server and engine exchange. Frozen, without behaviour, without MLX."""
