"""Custom tools, whose input is free text. To the model each is a function with one parameter."""

import json
from typing import Any

CUSTOM_INPUT = "input"
"""The function's one parameter."""


def custom_function(
    name: str, description: str | None, syntax: str | None, grammar: str | None
) -> dict[str, Any]:
    """The function as a chat declares it. It is strict, so that the input can be read back. The
    grammar is part of its description, and not enforced.
    """
    about = description or ""
    if grammar:
        about += f"\n\nThe input must match this grammar{f' ({syntax})' if syntax else ''}:\n"
        about += grammar
    text = {"type": "string", "description": "The tool's input, as free text."}
    parameters = {
        "type": "object",
        "properties": {CUSTOM_INPUT: text},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }
    return {
        "name": name,
        "description": about.strip(),
        "parameters": parameters,
        "strict": True,
    }


def custom_arguments(text: str) -> str:
    """A custom tool's input as the arguments of its function."""
    return json.dumps({CUSTOM_INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """A custom tool's input, read from its function's arguments.

    Arguments without one, as of an answer that was cut off, are returned as they are.
    """
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get(CUSTOM_INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
