"""`rootstock top`: a daemon's cache and its requests, drawn live in the terminal."""
