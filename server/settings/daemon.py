"""The settings of the daemon as a whole: address, access control, limits, dashboard and metrics."""

import ipaddress
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import ByteSize, Field, SecretStr, field_validator, model_validator
from pydantic_core import PydanticCustomError

from engine.values.settings import Section
from server.access.hosts import ANY_ORIGIN, APP_SCHEMES, is_host_name, is_origin
from server.access.keys import KeyFileError, Keyring, admin_key, read_keys
from server.http.listening import is_loopback
from server.settings.values import ENVIRONMENT_PREFIX, FROM_HOME, SettingsModel, Texts


class DaemonSettings(SettingsModel):
    """Settings that are the same for all models."""

    host: Annotated[str, Section.NETWORK] = Field(
        "127.0.0.1",
        min_length=1,
        description="Address to listen on. One that other machines can reach needs API keys.",
    )
    port: Annotated[int, Section.NETWORK] = Field(
        8000, ge=0, le=65535, description="Port to listen on; 0 selects a free one."
    )
    api_key: Annotated[SecretStr | None, Section.KEYS] = Field(
        None,
        description="An API key that may do everything. ROOTSTOCK_API_KEY keeps it out of the "
        "process list.",
    )
    api_keys_file: Annotated[Path | None, FROM_HOME, Section.KEYS] = Field(
        None,
        description="YAML file of keys (SHA-256), roles and limits; `rootstock key NAME` makes an"
        " entry.",
    )
    cache_namespace: Annotated[Literal["shared", "key"], Section.KEYS] = Field(
        "shared",
        description="Requests that share the cache: all, or those with the same API key.",
    )
    allow_public_without_key: Annotated[bool, Section.KEYS] = Field(
        False, description="Serve other machines without API keys."
    )
    allowed_host: Annotated[Texts, Section.NETWORK] = Field(
        (),
        description="Another Host name accepted without API keys, such as llm.lan or "
        "*.example.org.",
    )
    cors_origin: Annotated[Texts, Section.NETWORK] = Field(
        (),
        description="Allowed origin of web pages: https://chat.example.org, app://* for desktop "
        "programs, or * with API keys.",
    )
    fetch_images: Annotated[Texts, Section.NETWORK] = Field(
        (),
        description="Host from which images in requests are fetched, such as images.example.org or "
        "*.example.org. Without any, requests have to contain them.",
    )
    allow_priority: Annotated[bool, Section.KEYS] = Field(
        False, description="Allow `priority` in requests."
    )
    trusted_proxies: Annotated[Texts, Section.NETWORK] = Field(
        (), description="Address or network of a proxy whose X-Forwarded-For is trusted."
    )

    max_body_bytes: Annotated[ByteSize, Section.LIMITS] = Field(
        ByteSize(8 * 1024**2), gt=0, description="Largest body of a request."
    )
    max_image_body_bytes: Annotated[ByteSize, Section.LIMITS] = Field(
        ByteSize(48 * 1024**2),
        gt=0,
        description="Largest body of a request where a model takes images; without their data it "
        "may have max_body_bytes.",
    )
    image_store_bytes: Annotated[ByteSize, Section.LIMITS] = Field(
        ByteSize(1024**3),
        gt=0,
        description="Images on disk, as they were sent and as models read them.",
    )
    max_total_body_bytes: Annotated[ByteSize, Section.LIMITS] = Field(
        ByteSize(256 * 1024**2),
        gt=0,
        description="All bodies until a worker has read them, and what answers keep of them; beyond"
        " it the largest of the client that holds most is refused.",
    )
    max_unsent_bytes: Annotated[ByteSize, Section.LIMITS] = Field(
        ByteSize(256 * 1024**2),
        gt=0,
        description="Unsent output of one answer in memory.",
    )
    max_total_unsent_bytes: Annotated[ByteSize, Section.LIMITS] = Field(
        ByteSize(1024**3),
        gt=0,
        description="Unsent output of all answers; beyond it the largest of the client that holds"
        " most is ended.",
    )
    memory_guard: Annotated[float, Section.LIMITS] = Field(
        0.9,
        ge=0.5,
        le=1,
        description="Share of the memory of the machine, or of the control group, from which the "
        "daemon gives memory back; 1: it does not.",
    )
    max_stored_responses: Annotated[int, Section.LIMITS] = Field(
        1000,
        ge=0,
        le=1_000_000,
        description="Stored responses of /v1/responses; beyond it the client with the most loses "
        "its oldest.",
    )
    max_stored_bytes: Annotated[ByteSize, Section.LIMITS] = Field(
        ByteSize(256 * 1024**2),
        ge=0,
        description="Size of all stored responses; a conversation counts once.",
    )
    max_background_responses: Annotated[int, Section.LIMITS] = Field(
        64,
        ge=0,
        le=100_000,
        description="Running background responses of /v1/responses; one client may have as many "
        "as there are free places.",
    )
    batches: Annotated[Path | None, FROM_HOME, Section.LIMITS] = Field(
        None,
        description="Directory for the files and batches of clients, created if missing. Unset, "
        "neither is served; one daemon uses it at a time.",
    )
    max_batches: Annotated[int, Section.LIMITS] = Field(
        1000,
        ge=1,
        le=100_000,
        description="Batches, ended ones included; beyond it the client with the most loses its "
        "oldest that has ended.",
    )
    max_batch_bytes: Annotated[ByteSize, Section.LIMITS] = Field(
        ByteSize(4 * 1024**3),
        gt=0,
        description="Size of all files of clients, results of batches included; beyond it the "
        "client with the most loses its oldest file that no batch needs.",
    )
    max_file_bytes: Annotated[ByteSize, Section.LIMITS] = Field(
        ByteSize(200 * 1024**2), gt=0, description="Largest file of a client."
    )
    max_connections: Annotated[int, Section.LIMITS] = Field(
        2048,
        ge=2,
        le=65_536,
        description="Open connections; fewer if the limit of open files is lower.",
    )
    header_timeout_seconds: Annotated[float, Section.LIMITS] = Field(
        30.0, gt=0, le=3600, description="Time for the head of a request to arrive."
    )
    body_timeout_seconds: Annotated[float, Section.LIMITS] = Field(
        60.0, gt=0, le=3600, description="Time for the body of a request to arrive."
    )
    send_timeout_seconds: Annotated[float, Section.LIMITS] = Field(
        45.0,
        gt=0,
        le=3600,
        description="Time in which a client must read at least a byte.",
    )
    idle_timeout_seconds: Annotated[int, Section.LIMITS] = Field(
        120, ge=1, le=3600, description="How long a connection stays open between requests."
    )
    keepalive_seconds: Annotated[float, Section.LIMITS] = Field(
        10.0,
        gt=0,
        le=3600,
        description="Silence in a stream after which a keep-alive is sent.",
    )
    request_timeout_seconds: Annotated[float | None, Section.LIMITS] = Field(
        None,
        gt=0,
        le=86_400,
        description="Time from a request's arrival to the end of its answer, queue included. "
        "Unset: no limit.",
    )
    drain_timeout_seconds: Annotated[int, Section.LIMITS] = Field(
        30,
        ge=0,
        le=86_400,
        description="Time for running requests to finish after SIGINT or SIGTERM.",
    )

    dashboard: Annotated[bool, Section.NETWORK] = Field(
        True,
        description="Serve the dashboard and its routes.",
    )
    dashboard_text: Annotated[bool, Section.NETWORK] = Field(
        False, description="Show the text of cached prompts and answers, which are other people's."
    )
    vllm_metric_names: Annotated[bool, Section.NETWORK] = Field(
        True, description="Also expose metrics under vLLM's names."
    )

    @field_validator("host")
    @classmethod
    def _host_can_be_looked_up(cls, host: str) -> str:
        try:
            if ":" in host:
                ipaddress.IPv6Address(host.strip("[]"))
            host.encode("idna")
        except ValueError:
            raise PydanticCustomError(
                "host", "must be an address or the name of a host, without a port"
            ) from None
        return host

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

    @field_validator("allowed_host", "fetch_images")
    @classmethod
    def _hosts_have_no_port(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        if not all(map(is_host_name, hosts)):
            raise PydanticCustomError(
                "host_name", "must be names such as llm.lan or *.example.org, without a port"
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
                "cors_origin: * allows requests of every visited web page, which needs API keys",
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

    @model_validator(mode="after")
    def _one_body_fits_into_all(self) -> Self:
        if self.max_total_body_bytes < self.max_body_bytes:
            raise PydanticCustomError(
                "max_total_body_bytes",
                "max_total_body_bytes: must be at least max_body_bytes ({max_body_bytes})",
                {"max_body_bytes": int(self.max_body_bytes)},
            )
        return self

    @cached_property
    def keys(self) -> Keyring:
        """The API keys; empty if none are set. Raises KeyFileError."""
        own = () if self.api_key is None else (admin_key(self.api_key.get_secret_value()),)
        return Keyring((*own, *(read_keys(self.api_keys_file) if self.api_keys_file else ())))
