"""The notation of setting values: numbers, lists of texts, adapters, paths, and environment
variables.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    StringConstraints,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_settings import NoDecode

ENVIRONMENT_PREFIX = "ROOTSTOCK_"
CLIENT_KEY_VARIABLE = f"{ENVIRONMENT_PREFIX}CLIENT_API_KEY"
"""The API key that commands send to a daemon. It is no setting of the daemon's."""


def variable_of(name: str) -> str:
    """The environment variable that sets a setting of the daemon."""
    return f"{ENVIRONMENT_PREFIX}{name.upper()}"


class SettingsModel(BaseModel):
    """Settings of one subject. It refuses values that pydantic takes for other values: false and
    true as the numbers 0 and 1, and an empty text as the current directory.
    """

    @field_validator("*", mode="before")
    @classmethod
    def _is_not_taken_for_another(cls, value: object, info: ValidationInfo) -> object:
        annotation = cls.model_fields[str(info.field_name)].annotation
        kinds = {annotation, *get_args(annotation)}
        if isinstance(value, bool):  # YAML 1.1 reads `off` as false
            for kind in kinds & _NUMBER_ERRORS.keys():
                raise PydanticCustomError(_NUMBER_ERRORS[kind], "is no number")
        if value == "" and Path in kinds:
            raise PydanticCustomError("path_type", "is no path")
        return value


_NUMBER_ERRORS = {int: "int_type", float: "float_type", ByteSize: "byte_size"}
"""The error of pydantic for what is no number, by the types of numbers."""


def with_home(path: Path) -> Path:
    """The path, a leading ~ of which is replaced by the home: a shell does so, and YAML and systemd
    do not.
    """
    try:
        return path.expanduser()
    except RuntimeError:
        raise PydanticCustomError("path", "begins with a home that is not known") from None


FROM_HOME = AfterValidator(lambda path: None if path is None else with_home(path))
"""Makes a setting of a path take a leading ~."""


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
        Annotated[Path, AfterValidator(with_home)],
    ],
    NoDecode,
    BeforeValidator(_as_mapping),
]
