"""Where drafts of a sequence's next tokens come from, and how many of them pay. No MLX."""
