"""API keys, of which the daemon stores only the SHA-256, and the YAML file that lists them."""

import hmac
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from server.validation import plain_message

MAX_KEYS = 1024  # each request is compared with all of them
KEY_PREFIX = "sk-rootstock-"  # some clients want `sk-`; scanners for leaked secrets want more
KEY_BYTES = 32
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")  # of a key, as logs and metrics show it
API_KEY_NAME = "api_key"  # of the one in the setting of that name


class KeyFileError(Exception):
    """The file cannot be used. The text says where and why, without the file's contents."""


class Role(StrEnum):
    """Users reach the models; admins `/admin` besides."""

    USER = "user"
    ADMIN = "admin"


def _checked_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise PydanticCustomError(
            "name", "must be 1 to 64 letters, digits, . _ @ and -, a letter or digit first"
        )
    return name


class ApiKey(BaseModel):
    """One API key: an entry of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: Annotated[str, AfterValidator(_checked_name)]
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    role: Role = Role.USER
    models: tuple[str, ...] | None = Field(None, max_length=256)  # that it may use; None: all
    concurrency: int | None = Field(None, ge=1, le=1_000_000, strict=True)
    requests_per_minute: int | None = Field(None, ge=1, le=1_000_000, strict=True)
    tokens_per_minute: int | None = Field(None, ge=1, le=10**12, strict=True)


class Keyring:
    """All API keys."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self.keys = tuple(keys)
        self._digests = [bytes.fromhex(key.sha256) for key in keys]

    def __bool__(self) -> bool:
        return bool(self.keys)

    @property
    def identifies_clients(self) -> bool:
        """Whether keys identify clients: a single key shared by all does not."""
        return len(self.keys) > 1

    @property
    def has_limits(self) -> bool:
        return any(
            key.concurrency or key.requests_per_minute or key.tokens_per_minute for key in self.keys
        )

    def find(self, secret: bytes) -> ApiKey | None:
        """The key that was sent, found in the same time whichever it is, or none."""
        if not secret:
            return None
        given = sha256(secret).digest()
        same = [hmac.compare_digest(given, digest) for digest in self._digests]
        return next((key for key, is_same in zip(self.keys, same, strict=True) if is_same), None)


def digest_of(secret: str) -> str:
    return sha256(secret.encode()).hexdigest()


def new_secret() -> str:
    """A random key of 256 bits. It cannot be guessed, so a plain SHA-256 of it is enough."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def admin_key(secret: str) -> ApiKey:
    """The key of the setting `api_key`, which may do everything."""
    return ApiKey(name=API_KEY_NAME, sha256=digest_of(secret), role=Role.ADMIN)


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a YAML file: a list of entries with the fields of ApiKey.

    Raises KeyFileError.
    """
    entries = _entries(path)
    if len(entries) > MAX_KEYS:
        raise KeyFileError(f"{path} has {len(entries)} keys; at most {MAX_KEYS} may be")
    try:
        keys = TypeAdapter(tuple[ApiKey, ...]).validate_python(entries)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        index, *place = first["loc"]
        at = "".join(f"{part}: " for part in place)
        raise KeyFileError(f"{path}, key {int(index) + 1}: {at}{plain_message(first)}") from None
    if any(key.name == API_KEY_NAME for key in keys):
        raise KeyFileError(f"{path}: the name {API_KEY_NAME} is that of the setting's own key")
    for field in ("name", "sha256"):
        for index in _repeated(getattr(key, field) for key in keys):
            raise KeyFileError(f"{path}, key {index + 1}: this {field} is there twice")
    return keys


def entry_text(key: ApiKey) -> str:
    """The key as an entry of the file."""
    fields = key.model_dump(mode="json", exclude_none=True)
    return yaml.safe_dump([fields], sort_keys=False)


def _entries(path: Path) -> list[object]:
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise KeyFileError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise KeyFileError(f"{path} is not valid YAML") from None
    if not content:
        raise KeyFileError(f"{path} has no keys; `rootstock key NAME >> {path}` adds one")
    if not isinstance(content, list):
        raise KeyFileError(f"{path} must be a list of keys, as `rootstock key NAME` prints them")
    return content


def _repeated(values: Iterable[str]) -> Iterator[int]:
    seen: set[str] = set()
    for index, value in enumerate(values):
        if value in seen:
            yield index
        seen.add(value)
