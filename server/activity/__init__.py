"""Live requests, finished requests, and the figures of the last minutes. In memory, bounded.

tracker.py follows each request from its submission to the engine to its end. sequences.py counts
tokens and phases of finished sequences for `/metrics`. live.py joins requests with what the engine
knows of them. series.py keeps the figures of the last quarter of an hour. No text of prompts or
answers is in any of it.
"""
