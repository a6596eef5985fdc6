"""`python -m engine.grammar.worker SOCKET VOCABULARY`: file descriptors that it inherits."""

import json
import os
import signal
import socket
import sys

from llguidance import LLTokenizer

from engine.grammar.remote.wire import EXCEPTION_EXIT
from engine.grammar.worker.memory import bound_memory
from engine.grammar.worker.service import Service


def main() -> None:
    """Serve until the daemon closes its end of the socket, or is gone."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the daemon's to handle: it says when
        signal.signal(ignored, signal.SIG_IGN)
    bound_memory()
    connection, vocabulary = int(sys.argv[1]), int(sys.argv[2])
    peer = socket.socket(fileno=connection)
    try:
        Service(peer, _tokenizer(vocabulary)).run()
    except BaseException:  # what Rust raises is no Exception
        os._exit(EXCEPTION_EXIT)  # at once: who sees the socket close asks why
    peer.close()


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
