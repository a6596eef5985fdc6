"""Servers as child processes: started, waited for, stopped."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import httpx
import psutil

from load_tests.client import TargetError

START_SECONDS = 300.0  # a busy machine takes minutes to import some of them
STOP_SECONDS = 15.0

Process = subprocess.Popen[bytes]


@contextmanager
def running(
    command: Sequence[str],
    health_url: str,
    log: Path,
    start_seconds: float = START_SECONDS,
    variables: Mapping[str, str] = MappingProxyType({}),
    directory: Path | None = None,
) -> Iterator[Process]:
    """Run a server while the context lasts; its output goes to `log`, `variables` join its
    environment. `directory` is a checkout whose code it runs; None: this one's.

    Raises TargetError when `health_url` does not answer 200 in time. One that the body raises gets
    the log's end, too.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**_environment(), **_path(directory), **variables},
            cwd=directory,
        )
    try:
        _wait_until_ready(process, health_url, start_seconds)
        yield process
    except TargetError as error:
        raise TargetError(f"{error}\n{_state(process)}; end of {log}:\n{_end(log)}") from error
    finally:
        _stop(process)


def cpu_seconds(process: Process) -> float:
    """Of all its threads, since it was started."""
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


def free_port() -> int:
    """A port of the loopback on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _environment() -> dict[str, str]:
    """The parent's, with local models only: no server may look for anything outside.

    All have what `make serve` gives ours: large pages for glibc's malloc.
    """
    return {
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _path(directory: Path | None) -> Mapping[str, str]:
    return {} if directory is None else {"PYTHONPATH": str(directory)}


def _wait_until_ready(process: Process, url: str, limit_seconds: float) -> None:
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


def _state(process: Process) -> str:
    code = process.poll()
    return "the process still runs" if code is None else f"the process exited with {code}"


def _end(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


def _stop(process: Process) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
