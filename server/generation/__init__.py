"""Common parts of all dialects: conversations, prompts, engine requests, and answers made of
events.
"""
