"""The only reader of flags, environment and YAML. Everything else is handed one frozen Settings."""

import ipaddress
import os
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BeforeValidator,
    ByteSize,
    Field,
    SecretStr,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from engine.types import EngineConfig
from server.access.hosts import is_host_name
from server.access.keys import KeyFileError, Keyring, admin_key, read_keys
from server.access.origins import ANY_ORIGIN, APP_SCHEMES, is_origin
from server.parsing.registry import REASONING_FORMATS, TOOL_FORMATS

ENVIRONMENT_PREFIX = "ROOTSTOCK_"
CLIENT_KEY_VARIABLE = (
    f"{ENVIRONMENT_PREFIX}CLIENT_API_KEY"  # not the daemon's: of commands that ask it
)


def _as_texts(value: object) -> object:
    """A text, as variables and YAML may have it, is split at its commas."""
    if not isinstance(value, str):
        return value
    return tuple(filter(None, map(str.strip, value.split(","))))


Texts = Annotated[
    tuple[Annotated[str, StringConstraints(min_length=1, max_length=256)], ...],
    NoDecode,
    BeforeValidator(_as_texts),
]
"""A setting that may be given more than once."""


class SettingsError(Exception):
    """The settings cannot be used. The text has one line for each setting at fault."""


class Settings(BaseSettings):
    """What the daemon is told at start: a flag wins over ROOTSTOCK_*, that over YAML."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True
    )

    config: Path | None = Field(None, description="A YAML file with any of these settings.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="The least that is worth a line in the log."
    )

    model: str = Field(
        "",
        description="A directory or a Hugging Face repository; left empty, the embedded "
        "demonstration model.",
    )
    served_model_name: Texts = Field(
        (),
        description="The model's name in the API; more than one are aliases. Unset, its own.",
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="Where a request is silent: auto samples as the model's generation_config.json "
        "says, none from the model's distribution as it is.",
    )
    kv_cache_bytes: ByteSize | None = Field(
        None,
        gt=0,
        description="Size of the arena that holds the KV cache, such as 8GiB: allocated at start, "
        "never grows. Unset: a share of what the machine has left.",
    )
    state_cache_bytes: ByteSize | None = Field(
        None,
        ge=0,
        description="For saved states of recurrent layers. Unset: a quarter of the arena, if as "
        "much is useful.",
    )
    block_size: int = Field(32, ge=1, le=1024, description="Tokens in one block of the KV cache.")
    max_running: int = Field(
        32, ge=1, le=1024, description="Sequences that are computed together in one step."
    )
    max_waiting: int = Field(
        1024,
        ge=1,
        le=1_000_000,
        description="Sequences that may queue before requests are refused; of one client at most "
        "as many as places are free.",
    )
    step_tokens: int = Field(
        512,
        ge=1,
        le=1_000_000,
        description="Tokens computed in one step at most.",
    )
    max_step_seconds: float | None = Field(
        None,
        ge=0,
        le=3600,
        description="Beside answers that are being written, a step takes no more of a prompt than "
        "it has time for: less makes steadier streams, more lets prompts be through sooner. 0: "
        "step_tokens alone limits. Unset: 0.25.",
    )
    prefix_cache: bool = Field(
        True, description="Share KV between prompts that begin alike, and between turns."
    )
    attention: Literal["auto", "gather", "cascade"] = Field(
        "auto", description="How attention reads the blocks; auto is cascade on a CPU, else gather."
    )

    tool_parser: str = Field(
        "auto",
        description="How the model writes tool calls: the name of a format, auto to tell it from "
        "the chat template, or none.",
    )
    reasoning_parser: str = Field(
        "auto", description="How the model marks its reasoning: likewise."
    )

    strip_billing_header: bool = Field(
        True,
        description="Leave out of prompts the billing header with which Claude Code begins its "
        "system prompt: it differs between sessions, which would share nothing.",
    )

    host: str = Field(
        "127.0.0.1",
        description="Address to listen on; one that other machines can reach needs API keys.",
    )
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    api_key: SecretStr | None = Field(
        None,
        description="Ask for this key, which may do everything. ROOTSTOCK_API_KEY keeps it out of "
        "the process list and of files.",
    )
    api_keys_file: Path | None = Field(
        None,
        description="A YAML file with the SHA-256 of several keys, their roles and limits; "
        "`rootstock key NAME` makes an entry.",
    )
    cache_namespace: Literal["shared", "key"] = Field(
        "shared",
        description="Who shares what is cached: all, or only the requests of one API key.",
    )
    allow_public_without_key: bool = Field(
        False, description="Serve other machines although there are no API keys."
    )
    allowed_host: Texts = Field(
        (),
        description="Another name by which clients may call this machine while there are no API "
        "keys, such as llm.lan or *.example.org.",
    )
    cors_origin: Texts = Field(
        (),
        description="Let web pages from here ask: https://chat.example.org, app://* for desktop "
        "programs, or * where there are API keys.",
    )
    allow_priority: bool = Field(False, description="Whether a request may choose its priority.")
    trusted_proxies: Texts = Field(
        (), description="An address or network whose X-Forwarded-For counts."
    )
    max_body_bytes: ByteSize = Field(
        ByteSize(8 * 1024**2), gt=0, description="The largest body of a request."
    )
    max_total_body_bytes: ByteSize = Field(
        ByteSize(256 * 1024**2),
        gt=0,
        description="All bodies together that are arriving or being parsed.",
    )
    max_unsent_bytes: ByteSize = Field(
        ByteSize(256 * 1024**2),
        gt=0,
        description="What may wait to be sent of one answer, in memory.",
    )
    max_total_unsent_bytes: ByteSize = Field(
        ByteSize(1024**3),
        gt=0,
        description="The same of all answers together; beyond it the largest is ended.",
    )
    max_stored_responses: int = Field(
        1000,
        ge=0,
        le=1_000_000,
        description="Answers of /v1/responses kept in memory for when they are asked for again.",
    )
    max_stored_bytes: ByteSize = Field(
        ByteSize(256 * 1024**2), ge=0, description="All of them together, with what they answer."
    )
    max_background_responses: int = Field(
        64,
        ge=0,
        le=100_000,
        description="Answers of /v1/responses that are made at once while nobody waits.",
    )
    max_connections: int = Field(
        2048,
        ge=2,
        le=65_536,
        description="Open connections; fewer where the limit of open files is lower.",
    )
    header_timeout_seconds: float = Field(
        30.0, gt=0, le=3600, description="Time for the head of a request to arrive."
    )
    body_timeout_seconds: float = Field(
        60.0, gt=0, le=3600, description="Time for the body of a request to arrive."
    )
    send_timeout_seconds: float = Field(
        45.0,
        gt=0,
        le=3600,
        description="Time in which a client must take a byte of what is sent to it.",
    )
    idle_timeout_seconds: int = Field(
        120, ge=1, le=3600, description="How long a connection stays open between two requests."
    )
    keepalive_seconds: float = Field(
        10.0,
        gt=0,
        le=3600,
        description="Silence in a stream after which a comment or an event keeps it open.",
    )
    request_timeout_seconds: float | None = Field(
        None,
        gt=0,
        le=86_400,
        description="Time from a request's arrival to the end of its answer, its wait in the queue "
        "included. Unset: no limit.",
    )
    drain_timeout_seconds: int = Field(
        30,
        ge=0,
        le=86_400,
        description="Time for running requests to finish after the first SIGINT or SIGTERM.",
    )
    vllm_metric_names: bool = Field(
        True, description="Also name metrics as vLLM does, for dashboards made for it."
    )

    @field_validator("tool_parser", "reasoning_parser")
    @classmethod
    def _known_parser(cls, name: str, info: ValidationInfo) -> str:
        known = TOOL_FORMATS if info.field_name == "tool_parser" else REASONING_FORMATS
        if name not in {"auto", "none", *known}:
            names = ", ".join(("auto", "none", *sorted(known)))
            raise PydanticCustomError("parser", "must be one of {names}", {"names": names})
        return name

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
    def _proxies_are_addresses(cls, proxies: tuple[str, ...]) -> tuple[str, ...]:
        for proxy in proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError:
                raise PydanticCustomError(
                    "trusted_proxies", "must be IP addresses or networks"
                ) from None
        return proxies

    @field_validator("allowed_host")
    @classmethod
    def _hosts_have_no_port(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        if not all(map(is_host_name, hosts)):
            raise PydanticCustomError(
                "allowed_host", "must be names such as llm.lan or *.example.org, without a port"
            )
        return hosts

    @field_validator("cors_origin")
    @classmethod
    def _origins_are_as_browsers_send_them(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        if not all(map(is_origin, origins)):
            raise PydanticCustomError(
                "cors_origin",
                "must be origins as browsers send them, such as https://chat.example.org, "
                "or one of * and SCHEME://* with {schemes}",
                {"schemes": APP_SCHEMES.replace("|", ", ")},
            )
        return origins

    @model_validator(mode="after")
    def _keys_can_be_read(self) -> Self:
        try:
            _ = self.keys
        except KeyFileError as error:
            raise PydanticCustomError(
                "api_keys_file", "api_keys_file: {problem}", {"problem": str(error)}
            ) from None
        return self

    @model_validator(mode="after")
    def _any_page_needs_a_key(self) -> Self:
        if ANY_ORIGIN in self.cors_origin and not self.keys:
            raise PydanticCustomError(
                "cors_origin",
                "cors_origin: * lets every web page that somebody visits ask, which needs API keys",
            )
        return self

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
    def _one_body_fits_into_all(self) -> Self:
        if self.max_total_body_bytes < self.max_body_bytes:
            raise PydanticCustomError(
                "max_total_body_bytes",
                "max_total_body_bytes: must be at least max_body_bytes ({max_body_bytes})",
                {"max_body_bytes": int(self.max_body_bytes)},
            )
        return self

    @model_validator(mode="after")
    def _network_needs_a_key(self) -> Self:
        if not (is_loopback(self.host) or self.keys or self.allow_public_without_key):
            raise PydanticCustomError(
                "host",
                "host: {host} is reachable from other machines, which needs an api_key "
                "({prefix}API_KEY) or an api_keys_file; without one bind to 127.0.0.1, or set "
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

    @cached_property
    def keys(self) -> Keyring:
        """The keys that open anything; empty where none is asked for. Raises KeyFileError."""
        own = () if self.api_key is None else (admin_key(self.api_key.get_secret_value()),)
        return Keyring((*own, *(read_keys(self.api_keys_file) if self.api_keys_file else ())))

    def engine_config(self) -> EngineConfig:
        """The engine's share of the settings."""
        return EngineConfig(
            model=self.model,
            kv_cache_bytes=self.kv_cache_bytes,
            block_size=self.block_size,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            step_tokens=self.step_tokens,
            max_step_seconds=self.max_step_seconds,
            prefix_cache=self.prefix_cache,
            attention=self.attention,
            state_cache_bytes=self.state_cache_bytes,
            generation_config=self.generation_config,
        )


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


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address or name."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def base_url(host: str, port: int) -> str:
    """What OpenAI's clients call the base URL of a daemon at the host."""
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


def _line(error: ErrorDetails) -> str:
    """One line that names the setting, the limit, and where it can be set."""
    message = error["msg"][:1].lower() + error["msg"][1:]
    if not error["loc"]:
        return error["msg"]
    name = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        return f"{name}: {_no_such_setting(name)}"
    given = "" if name == "api_key" else f", not {error['input']!r}"
    return f"{name}: {message}{given} (set by {ENVIRONMENT_PREFIX}{name.upper()}, flag or YAML)"


def _refuse_unknown_variables() -> None:
    """Raise SettingsError for ROOTSTOCK_* variables that set nothing. Their case is free."""
    given = {name.upper() for name, value in os.environ.items() if value} - {CLIENT_KEY_VARIABLE}
    names = {
        name.removeprefix(ENVIRONMENT_PREFIX).lower()
        for name in given
        if name.startswith(ENVIRONMENT_PREFIX)
    }
    if unknown := sorted(names - set(Settings.model_fields)):
        lines = [f"{name.upper()}: {_no_such_setting(name)}" for name in unknown]
        raise SettingsError("\n".join(f"{ENVIRONMENT_PREFIX}{line}" for line in lines))


def _no_such_setting(name: str) -> str:
    alike = get_close_matches(name, Settings.model_fields, n=1)
    return "there is no such setting" + "".join(f"; did you mean {match}?" for match in alike)


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
