"""The only process in which images of clients are decoded: `python -m engine.images.worker SOCKET
CHECKPOINT`, a file descriptor that it inherits, and a folder.

A decoder may crash, hang or take any amount of memory. This process imports no MLX and no torch.
"""

import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import numpy as np

from engine.images.decode import MAX_ENCODED_BYTES, UnreadableImage, decode
from engine.images.pixels import Array
from engine.images.processors import Processor
from engine.images.wire import (
    MAX_ARRAY_BYTES,
    MEMORY_BYTES,
    PROCESSOR_SECONDS,
    PrepareJob,
    PrepareReport,
    array_file,
    unfinished_file,
)
from engine.process.sockets import FrameBuffer, send_all

READ_BYTES = 1 << 16


def serve(peer: socket.socket, processor: Processor) -> None:
    """Prepare one image after another, until the engine closes its end. What ends the process
    after the first report is the fault of an image.
    """
    send_all(peer, PrepareReport().frame())
    frames = FrameBuffer()
    while data := peer.recv(READ_BYTES):
        for body in frames.add(data):
            _limit_processor_time()
            send_all(peer, prepare(processor, PrepareJob.read(body)).frame())


def prepare(processor: Processor, job: PrepareJob) -> PrepareReport:
    """Do a job. An image that cannot be prepared is an error in the report."""
    try:
        with Path(job.source).open("rb") as source:
            encoded = source.read(MAX_ENCODED_BYTES + 1)
        pixels = processor.pixels(decode(encoded), job.detail)
        digest = processor.digest(pixels)
        write_array(Path(job.folder), digest, pixels.array)
    except UnreadableImage as error:
        return PrepareReport(error=str(error))
    except MemoryError:
        return PrepareReport(error="it takes too much memory to decode")
    except FileNotFoundError:
        return PrepareReport(error="it is no longer stored")
    except OSError as error:
        return PrepareReport(error=f"it cannot be stored: {error.strerror}")
    return PrepareReport(digest, pixels.grid)


def write_array(folder: Path, digest: bytes, array: Array) -> None:
    """Write the array's file at once, unless it is there. Raises OSError."""
    header = BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    file, unfinished = folder / array_file(digest), folder / unfinished_file(os.getpid())
    with suppress(FileNotFoundError):
        if file.stat().st_size == len(header.getvalue()) + array.nbytes:
            return
    try:
        with unfinished.open("wb") as written:
            written.write(header.getvalue())
            written.write(array.data)
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


def _limit_processor_time() -> None:
    """Let the system end this process if the next image takes more than it may."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(usage.ru_utime + usage.ru_stime) + 1 + PROCESSOR_SECONDS
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, most))


def _limit(kind: int, value: int) -> None:
    """Lower a limit of the process, which macOS may refuse."""
    _, most = resource.getrlimit(kind)
    with suppress(OSError, ValueError):
        if most == resource.RLIM_INFINITY or most > value:
            resource.setrlimit(kind, (value, most))


def main() -> None:
    """Serve until the engine closes its end of the socket, or is gone."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the daemon handles them
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing fails instead
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    _limit(resource.RLIMIT_FSIZE, MAX_ARRAY_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    peer = socket.socket(fileno=int(sys.argv[1]))
    with suppress(ConnectionError):  # the engine has closed its end
        serve(peer, Processor(Path(sys.argv[2])))
    peer.close()


if __name__ == "__main__":
    main()
