"""The only reader of flags, environment and YAML. Everything else is handed one frozen Settings."""

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import ByteSize, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from engine.types import EngineConfig

ENVIRONMENT_PREFIX = "ROOTSTOCK_"


class SettingsError(Exception):
    """The settings cannot be used. The text has one line for each setting at fault."""


class Settings(BaseSettings):
    """What the daemon is told at start: a flag wins over ROOTSTOCK_*, that over YAML."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True
    )

    config: Path | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    model: str = ""
    served_model_name: str | None = Field(None, min_length=1, max_length=256)
    kv_cache_bytes: ByteSize | None = Field(None, gt=0)
    state_cache_bytes: ByteSize | None = Field(None, ge=0)
    block_size: int = Field(32, ge=1, le=1024)
    max_running: int = Field(32, ge=1, le=1024)
    max_waiting: int = Field(1024, ge=1, le=1_000_000)
    step_tokens: int = Field(512, ge=1, le=1_000_000)
    prefix_cache: bool = True
    attention: Literal["auto", "gather", "cascade"] = "auto"

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    api_key: SecretStr | None = None
    allow_public_without_key: bool = False
    allow_priority: bool = False
    trusted_proxies: str = ""
    max_body_bytes: ByteSize = Field(ByteSize(8 * 1024**2), gt=0)
    keepalive_seconds: float = Field(10.0, gt=0, le=3600)
    drain_timeout_seconds: int = Field(30, ge=0, le=86_400)
    vllm_metric_names: bool = True

    @field_validator("api_key")
    @classmethod
    def _key_fits_a_header(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None:
            text = key.get_secret_value()
            if not text.isascii() or not text.isprintable() or text != text.strip() or not text:
                raise PydanticCustomError(
                    "api_key", "must be printable ASCII with no space at either end"
                )
        return key

    @field_validator("trusted_proxies")
    @classmethod
    def _proxies_are_addresses(cls, proxies: str) -> str:
        for proxy in filter(None, proxies.split(",")):
            try:
                ipaddress.ip_network(proxy.strip())
            except ValueError:
                raise PydanticCustomError(
                    "trusted_proxies", "must be IP addresses or networks, separated by commas"
                ) from None
        return proxies

    @model_validator(mode="after")
    def _step_holds_every_running_sequence(self) -> Self:
        if self.step_tokens < self.max_running:
            raise PydanticCustomError(
                "step_tokens",
                "step_tokens: must be at least max_running ({max_running}), because every "
                "running sequence computes a token in a step",
                {"max_running": self.max_running},
            )
        return self

    @model_validator(mode="after")
    def _network_needs_a_key(self) -> Self:
        if not (is_loopback(self.host) or self.api_key or self.allow_public_without_key):
            raise PydanticCustomError(
                "host",
                "host: {host} is reachable from other machines, which needs an api_key "
                "({prefix}API_KEY); without one bind to 127.0.0.1, or set "
                "allow_public_without_key to serve everyone",
                {"host": self.host, "prefix": ENVIRONMENT_PREFIX},
            )
        return self

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

    def engine_config(self) -> EngineConfig:
        """The engine's share of the settings."""
        return EngineConfig(
            model=self.model,
            kv_cache_bytes=self.kv_cache_bytes,
            block_size=self.block_size,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            step_tokens=self.step_tokens,
            prefix_cache=self.prefix_cache,
            attention=self.attention,
            state_cache_bytes=self.state_cache_bytes,
        )


def load_settings(flags: Mapping[str, Any]) -> Settings:
    """Settings from the flags that were given, the environment and the YAML file they name.

    Raises SettingsError.
    """
    try:
        return Settings(**flags)
    except ValidationError as error:
        lines = map(_line, error.errors(include_url=False))
        raise SettingsError("\n".join(lines)) from None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address or name."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _line(error: ErrorDetails) -> str:
    """One line that names the setting, the limit, and where it can be set."""
    message = error["msg"][:1].lower() + error["msg"][1:]
    if not error["loc"]:
        return error["msg"]
    name = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        return f"{name}: there is no such setting"
    given = "" if name == "api_key" else f", not {error['input']!r}"
    return f"{name}: {message}{given} (set by {ENVIRONMENT_PREFIX}{name.upper()}, flag or YAML)"


def _check_readable_mapping(path: Path) -> None:
    """Raise SettingsError unless the file is YAML that maps names to values, or is empty."""
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"config: cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = " ".join(str(error).split())
        raise SettingsError(f"config: {path} is not valid YAML: {problem}") from None
    if content is not None and not isinstance(content, dict):
        raise SettingsError(f"config: {path} must map setting names to values")
