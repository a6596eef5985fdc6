"""Servers as child processes: started on a free port, waited for, stopped."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from load_tests.client import Target, TargetError

STOP_SECONDS = 15.0
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
def serving(peer: Peer, model: Path, log: Path, start_seconds: float = 120.0) -> Iterator[Target]:
    """Run the peer while the context lasts; its output goes to `log`.

    Raises TargetError, with the log's end, when it does not answer `/health` in time.
    """
    port = _free_port()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            peer.command(model, port), stdout=output, stderr=subprocess.STDOUT, env=_environment()
        )
    try:
        _wait_until_ready(process, f"http://127.0.0.1:{port}/health", start_seconds)
        yield Target(f"http://127.0.0.1:{port}/v1", peer.model_name)
    except TargetError as error:
        raise TargetError(f"{error}\n{_state(process)}; end of {log}:\n{_end(log)}") from error
    finally:
        _stop(process)


def _environment() -> dict[str, str]:
    """The parent's, with local models only: no server may look for anything outside."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, limit_seconds: float) -> None:
    deadline = time.monotonic() + limit_seconds
    with httpx.Client(timeout=5, trust_env=False) as http:
        while time.monotonic() < deadline and process.poll() is None:
            try:
                if http.get(url).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(0.1)
    raise TargetError(f"did not become ready within {limit_seconds:.0f} s")


def _state(process: subprocess.Popen[bytes]) -> str:
    code = process.poll()
    return "the process still runs" if code is None else f"the process exited with {code}"


def _end(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
