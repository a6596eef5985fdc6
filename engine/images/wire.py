"""Messages between the engine and a worker that prepares images: JSON frames over a pair of
sockets. A worker has read what clients sent, so its reports are not trusted.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from engine.process.sockets import ProtocolError, framed
from engine.values.images import Detail

MEMORY_BYTES = 3 * 1024**3
"""The address space of a worker. An image of 40 megapixels takes half of it."""

PROCESSOR_SECONDS = 20
"""The processor time that a worker may take for one image. Whole seconds: the system counts so."""

MAX_ARRAY_BYTES = 1024**3


@dataclass(frozen=True, slots=True)
class PrepareJob:
    """Read the encoded image in the file `source`, and write its array into `folder`."""

    source: str
    folder: str
    detail: Detail

    def frame(self) -> bytes:
        return framed(json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, body: bytes) -> "PrepareJob":
        """Read the body of a frame."""
        fields: dict[str, str] = json.loads(body)
        return cls(fields["source"], fields["folder"], Detail(fields["detail"]))


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """What a worker has made of an image; with an `error`, why it could not. The first report of a
    worker says that it is ready, and has neither.
    """

    digest: bytes = b""
    grid: tuple[int, ...] = ()
    error: str = ""

    def frame(self) -> bytes:
        fields = {"digest": self.digest.hex(), "grid": self.grid, "error": self.error}
        return framed(json.dumps(fields).encode())

    @classmethod
    def read(cls, body: bytes) -> "PrepareReport":
        """Read the body of a frame. Raises ProtocolError."""
        try:
            fields: dict[str, Any] = json.loads(body)
            digest, grid = bytes.fromhex(fields["digest"]), tuple(map(int, fields["grid"]))
            return cls(digest, grid, str(fields["error"]))
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ProtocolError(f"not a report of a worker: {error}") from error


def array_file(digest: bytes) -> str:
    """The name of the file with the array of an image."""
    return f"{digest.hex()}.npy"


def unfinished_file(pid: int) -> str:
    """The name of the file that the worker with this process id writes."""
    return f".{pid}.part"
