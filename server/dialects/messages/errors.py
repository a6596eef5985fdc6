"""Anthropic's error object.

Types by status: https://docs.anthropic.com/en/api/errors
"""

from server.errors import ApiError, ContextTooLong
from server.schemas.messages.answer import MessagesError, MessagesErrorBody

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}

FIELDS = {
    "stop": "stop_sequences",
    "thinking_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "continue_final_message": "messages",
}
"""Fields of a chat with another name in a Messages request."""


def messages_error(error: ApiError, request_id: str) -> MessagesError:
    kind = TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    body = MessagesErrorBody(type=kind, message=_message(error))
    return MessagesError(type="error", error=body, request_id=request_id)


def _message(error: ApiError) -> str:
    if isinstance(error, ContextTooLong):  # these words make Claude Code compact
        return f"prompt is too long: {error.tokens} tokens > {error.limit} maximum"
    text = str(error)
    if error.param in FIELDS and text.startswith(error.param):
        return FIELDS[error.param] + text.removeprefix(error.param)
    return text
