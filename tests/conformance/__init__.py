"""The conformance run: every architecture of mlx-lm, served or refused."""
