"""The kinds of server that are compared, each started on a free port."""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from load_tests.client import Target, TargetError
from load_tests.processes import START_SECONDS, Process, free_port, running

STOCK_LISTEN_QUEUE = 5  # socketserver.TCPServer.request_queue_size
OWN_PYTHON = Path(sys.executable)
VLLM_MLX_PYTHON = Path(".peers/vllm_mlx/bin/python")
FOREIGN_PACKAGES = ("mlx", "mlx-lm", "vllm-mlx")


@dataclass(frozen=True, slots=True)
class Peer:
    """A kind of server. `arguments` follow its Python interpreter; {model} and {port} are filled
    in; `model_name` is what requests must ask for.
    """

    name: str
    arguments: tuple[str, ...]
    model_name: str
    python: Path = OWN_PYTHON

    def command(self, model: Path, port: int) -> list[str]:
        """The command line that serves `model` on `port` of the loopback."""
        return [
            str(self.python),
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
    """mlx_lm.server, with the BLAS that Rootstock loads; `mlx_lm_server.py` explains the queue."""
    module = ("-m", "load_tests.peers.mlx_lm_server", str(listen_queue))
    serve = ("--model", "{model}", "--port", "{port}", "--log-level", "WARNING")
    name = " ".join(("mlx_lm.server", *flags))
    return Peer(name, (*module, *serve, *flags), "default_model")


def vllm_mlx(*flags: str) -> Peer:
    """vllm-mlx with that BLAS, in its own environment, which `make bench` installs.

    Without continuous batching it computes one request at a time.
    """
    module = ("-m", "load_tests.peers.vllm_mlx_server", os.path.relpath(sys.prefix))
    serve = ("serve", "{model}", "--port", "{port}", "--served-model-name", "load-test")
    batching = ("--continuous-batching", "--offline")
    name = " ".join(("vllm-mlx", *flags))
    return Peer(name, (*module, *serve, *batching, *flags), "load-test", VLLM_MLX_PYTHON)


def foreign_versions(peers: Iterable[Peer]) -> dict[str, str]:
    """Versions in the peers' own environments, by "PACKAGE of PEER"."""
    return {
        f"{package.name} of {peer.name}": package.version
        for peer in peers
        if peer.python != OWN_PYTHON
        for folder in peer.python.parent.parent.glob("lib/python*/site-packages")
        for package in metadata.distributions(path=[str(folder)])
        if package.name in FOREIGN_PACKAGES
    }


@dataclass(frozen=True, slots=True)
class Server:
    """One life of a peer."""

    target: Target
    process: Process


@contextmanager
def serving(
    peer: Peer, model: Path, log: Path, start_seconds: float = START_SECONDS
) -> Iterator[Target]:
    """Run the peer in an empty home: vllm-mlx would find there what it had cached in the run
    before. See `living`.
    """
    with (
        TemporaryDirectory(prefix="home-") as home,
        living(peer, model, Path(home), log, start_seconds) as server,
    ):
        yield server.target


@contextmanager
def living(
    peer: Peer, model: Path, home: Path, log: Path, start_seconds: float = START_SECONDS
) -> Iterator[Server]:
    """Run the peer while the context lasts; its output goes to `log`.

    Raises TargetError, with the log's end, when it does not answer `/health` in time.
    """
    if not peer.python.exists():
        raise TargetError(f"there is no {peer.python}: `make bench` installs it")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    home_variable = {"HOME": str(home)}
    with running(
        peer.command(model, port), f"{url}/health", log, start_seconds, home_variable
    ) as process:
        yield Server(Target(f"{url}/v1", peer.model_name), process)
