"""Access control: API keys and their limits, allowed hosts and web origins."""
