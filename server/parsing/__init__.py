"""Parsers of tool calls and reasoning in streamed text, and grammars of tool calls.

Imports nothing else of the server.
"""
