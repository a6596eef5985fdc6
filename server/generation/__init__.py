"""What all dialects share: prompts, engine requests, and answers made of the engine's events.

Imports settings, parsing and the layers below them.
"""
