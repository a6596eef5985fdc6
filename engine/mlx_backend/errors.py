"""Why a model cannot be served."""

from engine.api import ModelError


class UnsupportedModel(ModelError):
    """The model's architecture cannot run over the arena."""


_LONGEST = 300  # characters of another library's message


def one_line(error: BaseException) -> str:
    """What another library says, on one line and cut where it goes on and on."""
    text = " ".join(str(error).split())
    if not text or isinstance(error, LookupError):  # a KeyError says nothing but the key
        text = f"{type(error).__name__} {text}".strip()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
