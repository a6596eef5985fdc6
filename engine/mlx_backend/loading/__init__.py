"""From a name to a checked model, and what of it fits into this machine."""
