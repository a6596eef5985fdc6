"""All settings as one, read from flags, environment and YAML."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from server.settings.access import AccessSettings
from server.settings.environment import CLIENT_KEY_VARIABLE, ENVIRONMENT_PREFIX, variable_of
from server.settings.errors import SettingsError, explained, suggestion
from server.settings.general import GeneralSettings
from server.settings.limits import LimitsSettings
from server.settings.models import ModelsSettings, from_json
from server.settings.monitoring import MonitoringSettings


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
        raise explained(
            error,
            daemon_settings=Settings.model_fields,
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
    meant = suggestion(name, Settings.model_fields)
    hint = f"; did you mean {variable_of(meant)}?" if meant else ""
    return f"{variable_of(name)}: there is no such setting{hint}"


def _read_file(path: Path) -> dict[str, Any]:
    """The settings in a YAML file. Raises SettingsError unless it maps names to values."""
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"config: cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = " ".join(str(error).split())
        raise SettingsError(f"config: {path} is not valid YAML: {problem}") from None
    if content is None:
        return {}
    if not (isinstance(content, dict) and all(isinstance(name, str) for name in content)):
        raise SettingsError(f"config: {path} must map setting names to values")
    if "config" in content:
        raise SettingsError(f"config: {path} cannot name another file")
    return content
