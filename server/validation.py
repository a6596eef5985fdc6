"""Plain words for what pydantic finds wrong in files and options."""

from pydantic_core import ErrorDetails

_SIZE = "must be a size such as 8GiB, 512MB or 1048576"
_INTEGER = "must be an integer"
_NUMBER = "must be a number"
_BOOLEAN = "must be true or false"

MESSAGES = {
    "bool_parsing": _BOOLEAN,
    "bool_type": _BOOLEAN,
    "byte_size": _SIZE,
    "byte_size_unit": _SIZE,
    "dict_type": "must be a mapping",
    "enum": "must be {expected}",
    "extra_forbidden": "there is no such field",
    "float_parsing": _NUMBER,
    "float_type": _NUMBER,
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": _INTEGER,
    "int_parsing": _INTEGER,
    "int_parsing_size": "must be an integer of fewer digits",
    "int_type": _INTEGER,
    "invalid_key": "must be the name of a setting",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "missing": "is missing",
    "model_type": "must be a mapping",
    "path_type": "must be a path",
    "string_pattern_mismatch": "must match {pattern}",
    "string_too_long": "must have a length of at most {max_length}",
    "string_too_short": "must have a length of at least {min_length}",
    "string_type": "must be a text",
    "tuple_type": "must be a list",
}
"""Replacements of pydantic's messages, by the type of the error."""


def plain_message(error: ErrorDetails) -> str:
    """What is wrong with a value, such as `must be at least 1`."""
    if error["type"] in MESSAGES:
        limits = {
            name: int(value) if isinstance(value, float) and value.is_integer() else value
            for name, value in error.get("ctx", {}).items()
        }
        return MESSAGES[error["type"]].format_map(limits)
    message = error["msg"].removeprefix("Input should ").removeprefix("String should ")
    return message if message == error["msg"] else f"must {message}"
