"""Seals on summaries of conversations, which clients keep and send back.

A summary is signed with a key of the installation's, so that nobody writes or changes one. It is
not encrypted: its client may read it.
"""

import base64
import binascii
import hmac
import logging
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from server.errors import InvalidField
from server.generation.conversation import digest_of

KEY_FILE = "summaries.key"
KEY_BYTES = 32
MAC_BYTES = 32
PREFIX = "rootstock-summary1:"
"""How a seal begins. It tells seals from those of other servers."""

DIGEST_BYTES = len(digest_of([]))

INVALID_SEAL = "compaction_signature_invalid"  # Anthropic's code
CHANGED_TEXT = "compaction_content_mismatch"  # Anthropic's, too

log = logging.getLogger("rootstock.compaction")


@dataclass(frozen=True, slots=True)
class Summary:
    """A summary, and the digest of the messages that it stands for."""

    text: str
    covered: bytes


class Seals:
    """Seals summaries with the key of a file, and opens them. The file is read, or made with a new
    random key, when the first summary is sealed or opened. Called in worker threads.
    """

    def __init__(self, folder: Callable[[], Path]) -> None:
        """`folder` names the folder of the key, which may not exist yet. Where it raises, or the
        key cannot be kept there, the key ends with the process, and a warning is logged.
        """
        self._folder = folder
        self._lock = Lock()
        self._key = b""
        self._is_kept = True

    def sealed(self, summary: Summary) -> str:
        """The summary as text for a client."""
        return self._seal(b"whole", summary.covered + _encoded(summary.text))

    def opened(self, sealed: str, field: str) -> Summary | None:
        """The summary of `sealed`. None for what another server has sealed. Raises ApiError (400)
        for any other text of that field.
        """
        if is_foreign(sealed):
            return None
        content = self._open(b"whole", sealed, field)
        if len(content) < DIGEST_BYTES:
            raise self._invalid(field)
        return Summary(content[DIGEST_BYTES:].decode(), content[:DIGEST_BYTES])

    def signature(self, text: str) -> str:
        """The signature of a summary whose text the client has next to it."""
        return self._seal(b"text", self._digest(text))

    def check(self, text: str, signature: str, field: str) -> None:
        """Raise ApiError (400) for a signature of this server that is not of this text. Those of
        other servers are not checked.
        """
        if is_foreign(signature):
            return
        signed = self._open(b"text", signature, f"{field}.signature")
        if not hmac.compare_digest(signed, self._digest(text)):
            message = "it is not the text that this server has signed"
            raise InvalidField(f"{field}.content", message, CHANGED_TEXT)

    def _digest(self, text: str) -> bytes:
        return hmac.digest(self._known_key(), b"digest" + _encoded(text), "sha256")

    def _seal(self, purpose: bytes, content: bytes) -> str:
        mac = hmac.digest(self._known_key(), purpose + content, "sha256")
        return PREFIX + base64.urlsafe_b64encode(mac + content).decode()

    def _open(self, purpose: bytes, sealed: str, field: str) -> bytes:
        try:
            raw = base64.b64decode(sealed[len(PREFIX) :].encode(), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise self._invalid(field) from None
        mac, content = raw[:MAC_BYTES], raw[MAC_BYTES:]
        known = hmac.digest(self._known_key(), purpose + content, "sha256")
        if not hmac.compare_digest(mac, known):
            raise self._invalid(field)
        return content

    def _invalid(self, field: str) -> InvalidField:
        self._known_key()
        why = "" if self._is_kept else " (perhaps by this server before it started: it keeps none)"
        message = f"it is damaged, or was sealed with another key{why}"
        return InvalidField(field, message, INVALID_SEAL)

    def _known_key(self) -> bytes:
        with self._lock:
            if not self._key:
                self._key = self._read_key()
            return self._key

    def _read_key(self) -> bytes:
        try:
            return _kept_key(self._folder())
        except (OSError, ValueError, RuntimeError) as error:
            self._is_kept = False
            log.warning(
                "summaries of conversations are sealed with a key that ends with this process: %s",
                error,
            )
            return secrets.token_bytes(KEY_BYTES)


def is_foreign(sealed: str) -> bool:
    """Whether another server has made the seal."""
    return not sealed.startswith(PREFIX)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # a lone surrogate is no text


def _kept_key(folder: Path) -> bytes:
    """The key of a folder, which gets one where it has none. Raises OSError, and ValueError for a
    file that is no key.
    """
    path = folder / KEY_FILE
    if not path.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = folder / f"{KEY_FILE}.{secrets.token_hex(8)}"
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(KEY_BYTES))
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):  # another daemon was first
                os.link(new, path)
        finally:
            new.unlink(missing_ok=True)
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        key = file.read(KEY_BYTES + 1)
    if len(key) != KEY_BYTES:
        raise ValueError(f"{path} does not have the {KEY_BYTES} bytes of a key")
    return key
