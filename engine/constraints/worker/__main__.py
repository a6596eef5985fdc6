"""`python -m engine.constraints.worker SOCKET VOCABULARY`: file descriptors that it inherits."""

import json
import os
import resource
import signal
import socket
import sys

from llguidance import LLTokenizer

from engine.constraints.worker.service import Service

FAILED = 1

MEMORY_BYTES = 1024**3
"""A vocabulary of 150,000 takes a tenth of it."""


def main() -> None:
    """Serve until the daemon closes its end of the socket, or is gone."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the daemon's to handle: it says when
        signal.signal(ignored, signal.SIG_IGN)
    _bound_memory()
    connection, vocabulary = int(sys.argv[1]), int(sys.argv[2])
    peer = socket.socket(fileno=connection)
    try:
        Service(peer, _tokenizer(vocabulary)).run()
    except BaseException:  # what Rust raises is no Exception
        os._exit(FAILED)  # at once: who sees the socket close asks why
    peer.close()


def _bound_memory() -> None:
    """Linux holds a process to this; macOS takes it and does not, so there time alone bounds it."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most == resource.RLIM_INFINITY or most > MEMORY_BYTES:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _tokenizer(descriptor: int) -> LLTokenizer:
    """From a file that all grammar processes share: read by position."""
    size = os.fstat(descriptor).st_size
    parts, at = [], 0
    while at < size:
        part = os.pread(descriptor, size - at, at)
        parts.append(part)
        at += len(part)
    os.close(descriptor)
    told = json.loads(b"".join(parts))
    return LLTokenizer(told["tokenizer"], n_vocab=told["size"], eos_token=told["eos"] or None)


main()
