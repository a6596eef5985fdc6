"""The backend's own error, and other libraries' errors as one line."""

from engine.api import ModelError


class UnsupportedModel(ModelError):
    """The model's architecture cannot run over the arena."""


_MAX_CHARACTERS = 300


def one_line(error: BaseException) -> str:
    """The message of another library's exception, on one line and cut if it is very long."""
    text = " ".join(str(error).split())
    if not text or isinstance(error, LookupError):  # the message of a KeyError is only the key
        text = f"{type(error).__name__} {text}".strip()
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]} ..."
