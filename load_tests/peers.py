"""The kinds of server that are compared, each started on a free port."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from load_tests.client import Target
from load_tests.processes import START_SECONDS, free_port, running

STOCK_LISTEN_QUEUE = 5  # socketserver.TCPServer.request_queue_size


@dataclass(frozen=True, slots=True)
class Peer:
    """A kind of server. `arguments` follow the Python interpreter; {model} and {port} are filled
    in; `model_name` is what requests must ask for.
    """

    name: str
    arguments: tuple[str, ...]
    model_name: str

    def command(self, model: Path, port: int) -> list[str]:
        """The command line that serves `model` on `port` of the loopback."""
        return [
            sys.executable,
            *(
                a.replace("{model}", str(model)).replace("{port}", str(port))
                for a in self.arguments
            ),
        ]


def rootstock(*flags: str) -> Peer:
    """This project's daemon."""
    serve = ("-m", "server", "serve", "--model", "{model}", "--port", "{port}")
    name = " ".join(("rootstock", *flags))
    return Peer(name, (*serve, "--served-model-name", "load-test", *flags), "load-test")


def mlx_lm(*flags: str, listen_queue: int = STOCK_LISTEN_QUEUE) -> Peer:
    """mlx_lm.server, with the BLAS that Rootstock loads; `mlx_lm_peer.py` explains the queue."""
    module = ("-m", "load_tests.mlx_lm_peer", str(listen_queue))
    serve = ("--model", "{model}", "--port", "{port}", "--log-level", "WARNING")
    name = " ".join(("mlx_lm.server", *flags))
    return Peer(name, (*module, *serve, *flags), "default_model")


@contextmanager
def serving(
    peer: Peer, model: Path, log: Path, start_seconds: float = START_SECONDS
) -> Iterator[Target]:
    """Run the peer while the context lasts; its output goes to `log`.

    Raises TargetError, with the log's end, when it does not answer `/health` in time.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with running(peer.command(model, port), f"{url}/health", log, start_seconds):
        yield Target(f"{url}/v1", peer.model_name)
