"""OpenAI's error object. All four keys are always there."""

from pydantic import BaseModel

UNSUPPORTED = "unsupported"
"""Code of what the API knows and this daemon lacks; also the type of pydantic's custom error."""


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorBody
