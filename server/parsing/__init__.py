"""Tool calls and reasoning out of a stream of text. No HTTP, no tokens."""
