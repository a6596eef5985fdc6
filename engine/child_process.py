"""Processes of our own modules: how they start, and what is done in one before an engine runs."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, Protocol, TypeAlias

from pydantic import Discriminator, TypeAdapter

from engine.api import ModelError
from engine.sockets import socket_pair
from engine.values.settings import EngineConfig

ROOT = Path(__file__).parents[1]
"""Where the package `engine` lies: in a clone, or inside of what the wheel installs."""


class ChildProcess(Protocol):
    """What of `subprocess.Popen` is used of one that runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, negative for the signal that has ended it. Raises TimeoutExpired."""
        ...

    def kill(self) -> None: ...


def ending(code: int) -> str:
    """A process's exit code, in words."""
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def start_child(
    module: str,
    *arguments: str,
    descriptors: Sequence[int] = (),
    errors: int | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Run `module`, whose arguments are its socket, the `descriptors` that it inherits, too, and
    `arguments`.

    It has this process's environment, with `variables` set.
    Its standard error is `errors`, or this process's own. Ctrl-C is this process's to handle. It
    stays in the same session: Linux gives each session the same part of a busy machine.

    Raises OSError where no process can be started.
    """
    ours, theirs = socket_pair()
    inherited = theirs.fileno(), *descriptors
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        with theirs:
            process = subprocess.Popen(
                # -P: nothing is imported from the current directory, which is the user's
                [sys.executable, "-P", "-m", module, *map(str, inherited), *arguments],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, **variables, "PYTHONPATH": path},
                process_group=0,
            )
    except OSError:
        ours.close()
        raise
    return ours, process


@dataclass(frozen=True, slots=True)
class Free:
    """How much MLX finds free."""

    kind: Literal["free"] = "free"


@dataclass(frozen=True, slots=True)
class Needed:
    """What a model takes, whose files are here, with so much for its KV cache and states unless the
    settings say how much. `memory_bytes` of the config is the most that there will be.
    """

    config: EngineConfig
    storage_bytes: int
    kind: Literal["needed"] = "needed"


Question: TypeAlias = Free | Needed


@dataclass(frozen=True, slots=True)
class Answer:
    n_bytes: int = 0
    error: str = ""


QUESTION: TypeAdapter[Question] = TypeAdapter(Annotated[Free | Needed, Discriminator("kind")])
ANSWER = TypeAdapter(Answer)


def ask(question: Question) -> int:
    """Bytes of memory. Raises ModelError."""
    connection, process = start_child(
        "engine.mlx_backend.asked", QUESTION.dump_json(question).decode()
    )
    with connection, connection.makefile("rb") as answered:
        said = answered.read()
    process.wait()
    if not said:
        raise ModelError("MLX does not start")
    answer = ANSWER.validate_json(said)
    if answer.error:
        raise ModelError(answer.error)
    return answer.n_bytes


Progress = Callable[[int, int], None]
"""Called with the bytes that are there and with those that there will be, as far as is known."""


@dataclass(frozen=True, slots=True)
class FetchReport:
    """A line that the process sends: how far it is, or, as its last line, how it ended."""

    done_bytes: int = 0
    total_bytes: int = 0
    has_ended: bool = False
    error: str = ""  # why the repository was not fetched


REPORT = TypeAdapter(FetchReport)


async def fetch_repository(repository: str, progress: Progress) -> None:
    """Fetch a checkpoint into the Hugging Face cache, if it is not there yet.

    `progress` is called on the event loop. Raises ModelError. Cancelled, it ends the process.
    """
    connection, process = await asyncio.to_thread(
        start_child, "engine.mlx_backend.fetched", repository
    )
    try:
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            last = await _last_report(reader, progress)
        finally:
            writer.close()
    finally:
        process.kill()  # which does nothing to one that has ended
        process.wait()
    if last is None:
        raise ModelError(f"{repository} was not fetched: the download's process has ended")
    if last.error:
        raise ModelError(last.error)


async def _last_report(reader: asyncio.StreamReader, progress: Progress) -> FetchReport | None:
    async for line in reader:
        report = REPORT.validate_json(line)
        if report.has_ended:
            return report
        progress(report.done_bytes, report.total_bytes)
    return None
