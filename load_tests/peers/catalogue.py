"""The kinds of server that are compared, each started on a free port."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from load_tests.client import Target, TargetError
from load_tests.processes import START_SECONDS, Process, free_port, running

STOCK_LISTEN_QUEUE = 5  # socketserver.TCPServer.request_queue_size
OWN_PYTHON = Path(sys.executable)
VLLM_MLX_PYTHON = Path(".peers/vllm_mlx/bin/python")
MLX_VLM_PYTHON = Path(".peers/mlx_vlm/bin/python")
FOREIGN_PACKAGES = ("mlx", "mlx-lm", "mlx-vlm", "vllm-mlx")


@dataclass(frozen=True, slots=True)
class Peer:
    """A kind of server. `arguments` follow its Python interpreter; `model_name` is what requests
    must ask for. In both, {model} and {port} are filled in. `variables` join its environment;
    `directory` is a checkout whose code it runs, None: this one's.
    """

    name: str
    arguments: tuple[str, ...]
    model_name: str
    python: Path = OWN_PYTHON
    variables: Mapping[str, str] = field(default_factory=dict)
    directory: Path | None = None

    def command(self, model: Path, port: int) -> list[str]:
        """The command line that serves `model` on `port` of the loopback."""
        return [
            str(self.python),
            *(_filled(argument, model, port) for argument in self.arguments),
        ]

    def target(self, model: Path, port: int) -> Target:
        """Where it is asked when `command` has started it."""
        return Target(f"http://127.0.0.1:{port}/v1", _filled(self.model_name, model, port))

    @property
    def described(self) -> str:
        """Its variables and command line, with {model} and {port}."""
        set_first = (f"{name}={value}" for name, value in self.variables.items())
        return " ".join((*set_first, "python", *self.arguments))


def _filled(text: str, model: Path, port: int) -> str:
    return text.replace("{model}", str(model)).replace("{port}", str(port))


def rootstock(*flags: str, directory: Path | None = None) -> Peer:
    """This project's daemon, of another checkout where `directory` is one."""
    serve = ("-m", "server", "serve", "--model", "{model}", "--port", "{port}")
    where = () if directory is None else (f"of {directory.name}",)
    name = " ".join(("rootstock", *flags, *where))
    arguments = (*serve, "--served-model-name", "load-test", *flags)
    return Peer(name, arguments, "load-test", directory=directory)


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
    serve = ("serve", "{model}", "--port", "{port}", "--served-model-name", "load-test")
    batching = ("--continuous-batching", "--offline")
    name = " ".join(("vllm-mlx", *flags))
    arguments = (*_foreign("vllm_mlx.cli"), *serve, *batching, *flags)
    return Peer(name, arguments, "load-test", VLLM_MLX_PYTHON)


def mlx_vlm(*flags: str) -> Peer:
    """mlx-vlm's server with that BLAS, in its own environment, and with its prefix cache, which is
    off by default.
    """
    serve = ("--model", "{model}", "--host", "127.0.0.1", "--port", "{port}")
    name = " ".join(("mlx-vlm", *flags))
    return Peer(
        name,
        (*_foreign("mlx_vlm.server.cli"), *serve, "--log-level", "WARNING", *flags),
        "{model}",
        MLX_VLM_PYTHON,
        {"APC_ENABLED": "1"},
    )


def _foreign(module: str) -> tuple[str, ...]:
    return "-m", "load_tests.peers.foreign_server", os.path.relpath(sys.prefix), module


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
    variables = {**peer.variables, "HOME": str(home)}
    with running(
        peer.command(model, port),
        f"http://127.0.0.1:{port}/health",
        log,
        start_seconds,
        variables,
        peer.directory,
    ) as process:
        yield Server(peer.target(model, port), process)
