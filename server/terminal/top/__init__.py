"""A daemon's cache and what runs on it, drawn in the terminal for as long as one looks."""
