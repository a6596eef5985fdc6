"""OpenAI's error object, with the field names of a Responses request.

Errors of the engine, and of what generation reads, name the fields of a chat.
"""

import re

from server.dialects.openai import openai_error
from server.errors import ApiError
from server.schemas.errors import ErrorResponse

_NAMES = (
    (re.compile(r"\bmax_(completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"\breasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"\b(tools\[\d+\]|tool_choice)\.function\b"), r"\1"),
    (re.compile(r"\bmessages(\[\d+\][.\w\[\]]*)?"), "input"),  # they are counted otherwise
)


def renamed(text: str) -> str:
    for pattern, name in _NAMES:
        text = pattern.sub(name, text)
    return text


def responses_error(error: ApiError) -> ErrorResponse:
    shaped = openai_error(error).error
    if shaped.param is None or shaped.param == (param := renamed(shaped.param)):
        return ErrorResponse(error=shaped)
    message = renamed(shaped.message)
    return ErrorResponse(error=shaped.model_copy(update={"param": param, "message": message}))
