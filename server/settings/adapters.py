"""The type of the setting that names adapters."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, StringConstraints
from pydantic_core import PydanticCustomError
from pydantic_settings import NoDecode

from server.settings.texts import as_texts


def _as_mapping(value: object) -> object:
    """Texts, as flags and variables have them, are NAME=DIRECTORY each."""
    texts = as_texts(value)
    if not isinstance(texts, list | tuple):
        return value
    pairs = [str(text).partition("=") for text in texts]
    names = [name for name, _, _ in pairs]
    if not all(directory for _, _, directory in pairs):
        raise PydanticCustomError("adapters", "must be NAME=DIRECTORY")
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
