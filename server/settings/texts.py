"""The type of settings that are lists of texts."""

from typing import Annotated

from pydantic import BeforeValidator, StringConstraints
from pydantic_settings import NoDecode


def as_texts(value: object) -> object:
    """A text, as variables and YAML may have it, is split at its commas."""
    if not isinstance(value, str):
        return value
    return tuple(filter(None, map(str.strip, value.split(","))))


Texts = Annotated[
    tuple[Annotated[str, StringConstraints(min_length=1, max_length=256)], ...],
    NoDecode,
    BeforeValidator(as_texts),
]
