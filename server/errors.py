"""Errors as an HTTP status and OpenAI's error fields."""

import re
from collections.abc import Sequence

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from engine.api import (
    EngineError,
    ImagesBusy,
    InvalidImage,
    InvalidRequest,
    NoGrammars,
    QueueFull,
)

UNSUPPORTED = "unsupported"
"""Code of features of the API that this daemon lacks; also the type of pydantic's custom error."""

RETRY_AFTER_SECONDS = 5  # where nothing says when there will be room
CLIENT_LEFT_STATUS = 499  # nginx's number, for the access log alone
MAX_PARAM_CHARACTERS = 128  # a client's own keys can be in it

_TAG = re.compile(r"\[key\]|str|int|float|bool|[a-z]+\[.*\]|[A-Z][A-Za-z]+")
"""Elements of pydantic's error locations that are no field: of dict keys and union members."""

INVALID = "invalid_request_error"
SERVER = "server_error"


class ApiError(Exception):
    """An error for a client: `type`, `param` and `code` are OpenAI's fields, `headers` are added to
    the response. `param` is the invalid field, if it is a single one.
    """

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers or {}

    def message(self, field: str | None) -> str:
        """The sentence for a client that knows the field at fault by this name."""
        return self.detail

    def __str__(self) -> str:
        return self.message(self.param)


class InvalidField(ApiError):
    """400: a field has a value that cannot be served. `detail` says why, without its name."""

    def __init__(self, field: str, detail: str, code: str | None = None) -> None:
        super().__init__(400, detail, param=field, code=code)

    def message(self, field: str | None) -> str:
        return f"{field}: {self.detail}"


class ContextTooLong(ApiError):
    """400: the prompt, which is in the field `param`, is too long. `tokens` is its length, perhaps
    with "at least" before it. `limit` is the most for prompt and answer, and `whose` says why, if
    that is not the model's context alone. `image_tokens` of the tokens are of images.
    """

    def __init__(
        self, tokens: str, limit: int, whose: str, param: str, image_tokens: int = 0
    ) -> None:
        maximum = f"This model's maximum context length is {limit} tokens{whose}"
        super().__init__(400, maximum, param=param, code="context_length_exceeded")
        self.tokens = tokens
        self.limit = limit
        self.image_tokens = image_tokens

    @property
    def of_images(self) -> str:
        """How many of the tokens are of images, as the end of a sentence."""
        return f", {self.image_tokens} of them of images" if self.image_tokens else ""

    def message(self, field: str | None) -> str:
        """The message in OpenAI's words, which LiteLLM and others search for."""
        resulted = f"However, your {field} resulted in {self.tokens} tokens{self.of_images}."
        return f"{self.detail}, the answer included. {resulted}"


class ModelNotFound(ApiError):
    """404: no model has this name. `known` lists, in words, the names that the client may use."""

    def __init__(self, name: str, known: str) -> None:
        message = f"The model '{name}' does not exist; there is {known}."
        super().__init__(404, message, param="model", code="model_not_found")
        self.name = name


class ClientDisconnected(Exception):
    """The client has closed its connection before the answer was complete."""


def invalid(message: str, param: str | None, code: str | None = None) -> ApiError:
    """400 in words of its own, where `InvalidField` does not fit."""
    return ApiError(400, message, param=param, code=code)


def invalid_field(error: ValidationError) -> ApiError:
    """400 for the first of pydantic's findings; the others are mostly its consequences."""
    first = error.errors(include_url=False, include_input=False)[0]
    param = _param(first["loc"])
    if not param:
        return invalid(first["msg"], None)
    code = UNSUPPORTED if first["type"] == UNSUPPORTED else None
    return InvalidField(param, first["msg"], code)


def not_loaded(message: str) -> ApiError:
    """409: the route looks into models that are loaded, and loads none."""
    return ApiError(409, message, param="model", code="model_not_loaded")


def timed_out() -> ApiError:
    """504: the request's time is over. The header keeps OpenAI's and Anthropic's clients from
    sending it again, as they do after a 504: it would take as long.
    """
    return ApiError(
        504,
        "The request took longer than this server allows (request_timeout_seconds).",
        type=SERVER,
        code="request_timeout",
        headers={"x-should-retry": "false"},
    )


def ended_by_admin() -> ApiError:
    """410: an admin has ended the request. OpenAI's and Anthropic's clients do not send it again
    after that status.
    """
    return ApiError(
        410,
        "An admin of this server has ended the request.",
        type=SERVER,
        code="ended_by_admin",
    )


def memory_short(message: str) -> ApiError:
    """503: the request is refused, or ended, because the machine is short of memory."""
    return busy(503, message, "memory_short", RETRY_AFTER_SECONDS)


def to_api_error(error: Exception) -> ApiError:
    """The error for the client. Unknown exceptions become a 500 without details."""
    match error:
        case ApiError():
            return error
        case EngineError():
            return _refusal(error)
        case HTTPException():
            return _http_error(error)
        case RequestValidationError():
            return _invalid_query(error)
        case _:
            return ApiError(
                500, "The server had an internal error.", type=SERVER, code="internal_error"
            )


def _invalid_query(error: RequestValidationError) -> ApiError:
    """400: an invalid path or query parameter, as FastAPI reports it."""
    first = error.errors()[0]
    param = _param(first["loc"][1:])
    return InvalidField(param, first["msg"])


def refused_field(field: str, reason: str, code: str | None = None) -> ApiError:
    """400: the engine refuses the field. Its reasons may begin with the field's name."""
    return InvalidField(field, reason.removeprefix(f"{field}: "), code)


def _refusal(error: EngineError) -> ApiError:
    match error:
        case InvalidRequest():
            return refused_field(error.param, str(error))
        case QueueFull():
            return busy(429, str(error), "rate_limit_exceeded", error.retry_after_seconds)
        case InvalidImage():
            return invalid(f"An image cannot be used: {error}", None, "invalid_image")
        case ImagesBusy():
            return busy(503, str(error), "images_busy", error.retry_after_seconds)
        case NoGrammars():
            return busy(503, str(error), "grammars_unavailable", RETRY_AFTER_SECONDS)
        case _:
            return busy(503, str(error), "engine_stopped", RETRY_AFTER_SECONDS)


def busy(status: int, message: str, code: str, retry_after_seconds: int) -> ApiError:
    """An error with Retry-After: 429 for a limit of the client's, else 503."""
    kind = "rate_limit_error" if status == 429 else SERVER
    headers = {"Retry-After": str(retry_after_seconds)}
    return ApiError(status, message, type=kind, code=code, headers=headers)


def _http_error(error: HTTPException) -> ApiError:
    codes = {404: "unknown_url", 405: "method_not_allowed"}
    kind = SERVER if error.status_code >= 500 else INVALID
    headers = dict(error.headers or {})
    code = codes.get(error.status_code)
    return ApiError(error.status_code, error.detail, type=kind, code=code, headers=headers)


def _param(location: Sequence[str | int]) -> str:
    """`("messages", 0, "content")` as `messages[0].content`."""
    path = ""
    for part in location:
        if isinstance(part, str) and _TAG.fullmatch(part):
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.lstrip(".")[:MAX_PARAM_CHARACTERS]
