"""Frames over a socket between two processes: a length (4 bytes, little-endian) and a body."""

import struct

MAX_FRAME_BYTES = 64 * 1024**2

RECEIVED_BYTES = 1 << 18
"""At most, with one call of the system."""

_LENGTH = struct.Struct("<I")


class ProtocolError(Exception):
    """A message does not follow the protocol, or is too long for a frame."""


class FrameBuffer:
    """Bytes as they arrive, frames as they are whole."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, data: bytes) -> list[bytes]:
        """The bodies that are whole now. Raises ProtocolError."""
        self._bytes += data
        bodies, at = [], 0
        while len(self._bytes) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes, at)
            _check_length(length)
            end = at + _LENGTH.size + length
            if len(self._bytes) < end:
                break
            bodies.append(bytes(self._bytes[at + _LENGTH.size : end]))
            at = end
        del self._bytes[:at]
        return bodies


def framed(body: bytes) -> bytes:
    """The body as a frame. Raises ProtocolError for one that no receiver would take."""
    _check_length(len(body))
    return _LENGTH.pack(len(body)) + body


def _check_length(n_bytes: int) -> None:
    if n_bytes > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {n_bytes} bytes; {MAX_FRAME_BYTES} are the most")
