"""The proof that both ends of a connection have the same key, which is never sent.

Each end sends its role and a random number, then an HMAC with the key over both numbers and its
role. The end that connected proves first: an end that listens sends nothing on which keys could be
tried. Afterwards the connection is as it was, neither encrypted nor signed.
"""

import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from enum import IntEnum
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

HANDSHAKE_SECONDS = 5.0
"""The most that a handshake takes, whatever the other end sends, and how slowly."""

VERSION = 1

KEY_BYTES = 32
"""The fewest bytes of a key: nobody finds it by trying. `openssl rand -hex 32` writes 64."""

MAX_KEY_BYTES = 4096

_MAGIC = b"rootrank"
_NONCE_BYTES = 32
_PROOF_BYTES = sha256().digest_size


class Role(IntEnum):
    """An end of a connection. Both prove the same key, each in its own role, so that nobody can use
    what an end has sent against that end.
    """

    LISTENER = 1
    JOINER = 2


class HandshakeError(Exception):
    """The other end has not proved that it has the key."""


class _Hello(NamedTuple):
    magic: bytes
    version: int
    role: int
    nonce: bytes


_HELLO = struct.Struct(f"<{len(_MAGIC)}sHB{_NONCE_BYTES}s")


def read_key(path: Path) -> bytes:
    """The key in a file, without white space around it. Raises ValueError for a file that cannot be
    read, that other users may read, or whose key is too short or too long.
    """
    try:
        with path.open("rb") as file:
            others_may = os.fstat(file.fileno()).st_mode & 0o077
            key = file.read(MAX_KEY_BYTES + 1).strip()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    if others_may:
        raise ValueError(f"{path} may be read by other users of this machine: chmod 600 {path}")
    if not KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise ValueError(
            f"{path} must have from {KEY_BYTES} to {MAX_KEY_BYTES} bytes, as "
            "`openssl rand -hex 32` writes them"
        )
    return key


def shake_hands(
    connection: socket.socket,
    key: bytes,
    role: Role,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Prove to the other end of a new connection that this one has the key, and have it prove the
    same. The socket has no timeout afterwards. Raises HandshakeError, also where the connection
    ends or the other end is too slow; the connection is then of no use.
    """
    deadline = clock() + HANDSHAKE_SECONDS
    own = _Hello(_MAGIC, VERSION, role, secrets.token_bytes(_NONCE_BYTES))
    try:
        connection.settimeout(HANDSHAKE_SECONDS)
        connection.sendall(_HELLO.pack(*own))
        other = _read_hello(_receive(connection, _HELLO.size, deadline, clock), role)
        if role is Role.JOINER:
            connection.sendall(_proof(key, own, other))
        proof = _receive(connection, _PROOF_BYTES, deadline, clock)
        if not hmac.compare_digest(proof, _proof(key, other, own)):
            raise HandshakeError("it has another key")
        if role is Role.LISTENER:
            connection.sendall(_proof(key, own, other))
        connection.settimeout(None)
    except TimeoutError:
        message = f"it has not proved the key within {HANDSHAKE_SECONDS:g} s"
        raise HandshakeError(message) from None
    except OSError as error:
        raise HandshakeError(f"the connection has ended: {error.strerror}") from error


def _read_hello(data: bytes, role: Role) -> _Hello:
    """The other end's first frame. Raises HandshakeError for one of the own role, of another
    version or of another program.
    """
    hello = _Hello(*_HELLO.unpack(data))
    if hello.magic != _MAGIC:
        raise HandshakeError("it is no rank of a model")
    if hello.version != VERSION:
        raise HandshakeError(f"its handshake has version {hello.version}; this one's is {VERSION}")
    if hello.role == role:
        raise HandshakeError("it claims the role of this end")
    return hello


def _proof(key: bytes, prover: _Hello, other: _Hello) -> bytes:
    """What the end that has sent `prover` sends to show that it has the key."""
    return hmac.digest(key, _HELLO.pack(*prover) + other.nonce, sha256)


def _receive(
    connection: socket.socket, n_bytes: int, deadline: float, clock: Callable[[], float]
) -> bytes:
    """Exactly so many bytes. Raises HandshakeError at the end of the connection, and TimeoutError
    at the deadline.
    """
    data = b""
    while len(data) < n_bytes:
        if (left_seconds := deadline - clock()) <= 0:
            raise TimeoutError
        connection.settimeout(left_seconds)
        received = connection.recv(n_bytes - len(data))
        if not received:
            raise HandshakeError("it has closed the connection, as one does that has another key")
        data += received
    return data
