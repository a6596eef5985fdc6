"""Live and finished requests. In memory, bounded, and without any text of prompts or answers.

tracker.py follows each request from its submission to the engine to its end. sequences.py counts
tokens and phases of finished sequences for `/metrics`.
"""
