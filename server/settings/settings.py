"""All settings as one, read from flags, environment and YAML, and their error messages."""

import os
from collections.abc import Collection, Hashable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from server.settings.daemon import DaemonSettings
from server.settings.models import ModelSettings, ModelsSettings, from_json
from server.settings.values import (
    CLIENT_KEY_VARIABLE,
    ENVIRONMENT_PREFIX,
    SettingsModel,
    variable_of,
    with_home,
)
from server.validation import plain_message

SECRET = "api_key"
"""The setting whose value is never shown."""

ENTRY = "must be a mapping such as {model: models/tiny}"
"""The message for an entry of `models` that is not a mapping."""

LONGEST_VALUE = 80
"""Characters of a refused value that are shown."""

YAML_HINTS = {
    "mapping values are not allowed here": "is the line indented too far, or a text with a colon "
    "not in quotes?",
    "found character '\\t' that cannot start any token": "indent with spaces",
}
"""What the reasons of PyYAML mostly mean."""

NEED_ANOTHER_KIND = frozenset({"dict_type", "model_type", "tuple_type"})
"""The errors about what kind of value is given, such as a text in place of a list."""


class SettingsError(Exception):
    """The settings cannot be used. The text has one line for each setting at fault."""


class GeneralSettings(SettingsModel):
    """The YAML file and the log level. They come first in `--help` and in the reference."""

    config: Path | None = Field(None, description="A YAML file with any of these settings.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest severity to log."
    )


# Of several bases the last has the first fields: in --help, the YAML file and the documents
class Settings(DaemonSettings, ModelsSettings, GeneralSettings, BaseSettings):
    """All settings. A flag wins over a variable ROOTSTOCK_*, and that over YAML."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        config = init_settings().get("config") or env_settings().get("config")
        if config is None:
            return init_settings, env_settings
        file = InitSettingsSource(settings_cls, _read_file(Path(config)))
        return init_settings, env_settings, file


def load_settings(flags: Mapping[str, Any]) -> Settings:
    """Settings from the flags that were given, the environment and the YAML file they name.

    Raises SettingsError.
    """
    variables = _variables()
    if unknown := sorted(set(variables) - set(Settings.model_fields)):
        raise SettingsError("\n".join(map(_unknown_variable, unknown)))
    try:
        return Settings(**flags)
    except ValidationError as error:
        config = flags.get("config") or variables.get("config")
        file = _read_file(Path(config)) if config else {}
        given = {**file, **variables, **flags}
        raise _explained(
            error,
            models=from_json(given.get("models")),
            variables=set(variables) - set(flags),
        ) from None


def _variables() -> dict[str, str]:
    """The settings that environment variables set, and their texts. Case does not matter."""
    prefix = ENVIRONMENT_PREFIX.lower()
    given = {name.lower(): value for name, value in os.environ.items() if value}
    given.pop(CLIENT_KEY_VARIABLE.lower(), None)
    return {
        name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)
    }


def _unknown_variable(name: str) -> str:
    meant = _suggestion(name, Settings.model_fields)
    hint = f"; did you mean {variable_of(meant)}?" if meant else ""
    return f"{variable_of(name)}: there is no such setting{hint}"


class _Loader(yaml.SafeLoader):
    """Reads YAML, and refuses a mapping that has a name twice. PyYAML's own loader takes the last
    value.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in names:
                    raise yaml.constructor.ConstructorError(
                        problem=f"{key.value} is there twice", problem_mark=key.start_mark
                    )
                names.add(key.value)
        return super().construct_mapping(node, deep)


def _read_file(path: Path) -> dict[str, Any]:
    """The settings in a YAML file. Raises SettingsError unless it maps names to values."""
    try:
        content = yaml.load(with_home(path).read_text("utf-8"), _Loader)
    except PydanticCustomError as error:
        raise SettingsError(f"config: {path} {error.message()}") from None
    except OSError as error:
        raise SettingsError(f"config: cannot read {path.absolute()}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"config: {path} is no text in UTF-8") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"config: {path}{_yaml_problem(error)}") from None
    if content is None:
        return {}
    if not (isinstance(content, dict) and all(isinstance(name, str) for name in content)):
        raise SettingsError(f"config: {path} must map setting names to values")
    if "config" in content:
        raise SettingsError(f"config: {path} cannot name another file")
    return content


def _yaml_problem(error: yaml.YAMLError) -> str:
    """The position and reason of a YAML error, as the end of a line that begins with the path."""
    match error:
        case yaml.MarkedYAMLError(problem_mark=yaml.Mark(line=line), problem=str(problem)):
            hint = YAML_HINTS.get(problem)
            return f", line {line + 1}: {problem}" + (f" ({hint})" if hint else "")
        case _:  # a character that YAML does not allow
            return f" is not valid YAML: {' '.join(str(error).split())}"


def _explained(
    error: ValidationError,
    models: object,
    variables: Collection[str],
) -> SettingsError:
    """The error for the user: each line names a setting, and what its value must be.

    `models` is the value of the setting `models` before validation, which names the models.
    `variables` are the settings whose value came from an environment variable.
    """
    lines = []
    for details in error.errors(include_url=False):
        line = _line(details, models)
        name = str(details["loc"][0]) if details["loc"] else details["type"]
        lines.append(f"{line} (set by {variable_of(name)})" if name in variables else line)
    return SettingsError("\n".join(lines))


def _suggestion(name: str, known: Collection[str]) -> str:
    """The known name that is closest to this one, or an empty text."""
    return next(iter(get_close_matches(name, known, n=1)), "")


def _line(error: ErrorDetails, models: object) -> str:
    if error["type"] == "extra_forbidden":
        return _unknown(error["loc"], models)
    place = _place(error["loc"])
    if error["type"] in Settings.model_fields and error["msg"].startswith(f"{error['type']}: "):
        # A rule among several settings: its message begins with the one to change
        return f"{place}.{error['msg']}" if place else error["msg"]
    message = ENTRY if error["type"] == "model_type" else plain_message(error)
    return f"{place}: {message}{_given(error)}"


def _unknown(loc: tuple[int | str, ...], models: object) -> str:
    """The line for a name that is no setting, or none that is allowed in an entry of `models`."""
    *entry, last = loc
    name = str(last)
    if not entry:
        meant = _suggestion(name, Settings.model_fields)
        return f"{name}: there is no such setting" + (f"; did you mean {meant}?" if meant else "")
    place = _place(tuple(entry)) + _model_name(models, loc[1])
    if name in Settings.model_fields:
        return (
            f"{place}: {name} is a setting of the daemon, not of one model: "
            "move it to the top level"
        )
    meant = _suggestion(name, ModelSettings.model_fields)
    return f"{place}: there is no setting {name}" + (f"; did you mean {meant}?" if meant else "")


def _model_name(models: object, index: int | str) -> str:
    """The model of an entry, in parentheses; empty where the entry names none."""
    match models:
        case list() | tuple() if isinstance(index, int) and index < len(models):
            entry = models[index]
            name = entry.get("model") if isinstance(entry, Mapping) else None
            return f" ({_shortened(name)})" if name and isinstance(name, str) else ""
    return ""


def _place(loc: tuple[int | str, ...]) -> str:
    """The setting, as in `models[0].served_model_name[1]`."""
    place = ""
    for part in loc:
        if isinstance(part, int):
            place += f"[{part}]"
        elif part != "[key]":  # pydantic's mark of an error in a key; the key itself is before it
            place += f".{part}" if place else part
    return place


def _given(error: ErrorDetails) -> str:
    """The refused value, or only its kind where another kind is needed."""
    if SECRET in error["loc"] or error["type"] == SECRET:
        return ""
    value = error["input"]
    if value is None or isinstance(value, Mapping) or error["type"] in NEED_ANOTHER_KIND:
        return f", not {_kind(value)}"
    return f", not {_shortened(repr(value))}"


def _kind(value: object) -> str:
    kinds = {str: "a text", bool: "true or false", list: "a list", tuple: "a list"}
    if value is None:
        return "empty"
    return "a mapping" if isinstance(value, Mapping) else kinds.get(type(value), "a number")


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
