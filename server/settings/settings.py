"""All settings as one, read from flags, environment and YAML."""

import os
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from server.settings.access import AccessSettings
from server.settings.environment import CLIENT_KEY_VARIABLE, ENVIRONMENT_PREFIX
from server.settings.general import GeneralSettings
from server.settings.limits import LimitsSettings
from server.settings.models import ModelsSettings
from server.settings.monitoring import MonitoringSettings

SIZES = "must be a size such as 8GiB, 512MB or 1048576"
MESSAGES = {"byte_size": SIZES, "byte_size_unit": SIZES}
"""Instead of pydantic's own, by the type of the error."""


class SettingsError(Exception):
    """The settings cannot be used. The text has one line for each setting at fault."""


# Of several bases the last has the first fields: in --help, the YAML file and the documents
class Settings(
    MonitoringSettings,
    LimitsSettings,
    AccessSettings,
    ModelsSettings,
    GeneralSettings,
    BaseSettings,
):
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
        _check_readable_mapping(Path(config))
        return init_settings, env_settings, YamlConfigSettingsSource(settings_cls, Path(config))


def load_settings(flags: Mapping[str, Any]) -> Settings:
    """Settings from the flags that were given, the environment and the YAML file they name.

    Raises SettingsError.
    """
    _refuse_unknown_variables()
    try:
        return Settings(**flags)
    except ValidationError as error:
        lines = map(_line, error.errors(include_url=False))
        raise SettingsError("\n".join(lines)) from None


def _line(error: ErrorDetails) -> str:
    """One line that names the setting, the limit, and where it can be set."""
    message = MESSAGES.get(error["type"], error["msg"][:1].lower() + error["msg"][1:])
    if not error["loc"]:
        return error["msg"]
    name = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        return _no_such_setting(name, written=str)
    given = "" if name == "api_key" else f", not {error['input']!r}"
    return f"{name}: {message}{given} (set by {_variable(name)}, flag or YAML)"


def _refuse_unknown_variables() -> None:
    """Raise SettingsError for ROOTSTOCK_* variables that set nothing. Their case is free."""
    given = {name.upper() for name, value in os.environ.items() if value} - {CLIENT_KEY_VARIABLE}
    names = {
        name.removeprefix(ENVIRONMENT_PREFIX).lower()
        for name in given
        if name.startswith(ENVIRONMENT_PREFIX)
    }
    if unknown := sorted(names - set(Settings.model_fields)):
        lines = [_no_such_setting(name, written=_variable) for name in unknown]
        raise SettingsError("\n".join(lines))


def _variable(name: str) -> str:
    return f"{ENVIRONMENT_PREFIX}{name.upper()}"


def _no_such_setting(name: str, written: Callable[[str], str]) -> str:
    """`written` says how a name is written where this one was found."""
    alike = get_close_matches(name, Settings.model_fields, n=1)
    meant = "".join(f"; did you mean {written(match)}?" for match in alike)
    return f"{written(name)}: there is no such setting{meant}"


def _check_readable_mapping(path: Path) -> None:
    """Raise SettingsError unless the file is YAML that maps names to values, or is empty."""
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"config: cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = " ".join(str(error).split())
        raise SettingsError(f"config: {path} is not valid YAML: {problem}") from None
    is_mapping = isinstance(content, dict) and all(isinstance(name, str) for name in content)
    if content is not None and not is_mapping:
        raise SettingsError(f"config: {path} must map setting names to values")
    if content and "config" in content:
        raise SettingsError(f"config: {path} cannot name another file")
