"""The notation of setting values: lists of texts, adapters, and environment variables."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, StringConstraints
from pydantic_core import PydanticCustomError
from pydantic_settings import NoDecode

ENVIRONMENT_PREFIX = "ROOTSTOCK_"
CLIENT_KEY_VARIABLE = f"{ENVIRONMENT_PREFIX}CLIENT_API_KEY"
"""The API key that commands send to a daemon. It is no setting of the daemon's."""


def variable_of(name: str) -> str:
    """The environment variable that sets a setting of the daemon."""
    return f"{ENVIRONMENT_PREFIX}{name.upper()}"


def as_texts(value: object) -> object:
    """Split a text, as variables and YAML may have it, at its commas."""
    if not isinstance(value, str):
        return value
    return tuple(filter(None, map(str.strip, value.split(","))))


Texts = Annotated[
    tuple[Annotated[str, StringConstraints(min_length=1, max_length=256)], ...],
    NoDecode,
    BeforeValidator(as_texts),
]


def _as_mapping(value: object) -> object:
    """Read texts such as NAME=FOLDER, as flags and variables have them, into a mapping."""
    texts = as_texts(value)
    if not isinstance(texts, list | tuple):
        return value
    pairs = [str(text).partition("=") for text in texts]
    names = [name for name, _, _ in pairs]
    if not all(directory for _, _, directory in pairs):
        raise PydanticCustomError("adapters", "must be NAME=FOLDER, such as sql=~/adapters/sql")
    if len(set(names)) < len(names):
        raise PydanticCustomError("adapters", "must have each name once")
    return {name: directory for name, _, directory in pairs}


Adapters = Annotated[
    Mapping[
        Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)],
        Path,
    ],
    NoDecode,
    BeforeValidator(_as_mapping),
]
