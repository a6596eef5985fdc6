"""Parsers of tool calls and reasoning in streamed text, and grammars of tool calls. How families of
models write calls is in `formats`, a file for each notation.
"""
