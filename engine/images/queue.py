"""The engine's end of the preparation of images: a queue, and the processes that work it off.

An image ends at most its own process. Nothing of it is read here but the worker's report.
"""

import asyncio
import logging
import math
import os
import signal
import socket
import subprocess
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from engine.api import EngineStopped, ImagesBusy, InvalidImage, one_line
from engine.images.layout import ImageLayout
from engine.images.wire import (
    MEMORY_BYTES,
    PROCESSOR_SECONDS,
    PrepareJob,
    PrepareReport,
    array_file,
    unfinished_file,
)
from engine.process.child import ending, start_child
from engine.process.footprint import footprint_bytes
from engine.process.sockets import FrameBuffer, ProtocolError
from engine.values.images import Detail, PreparedImage

logger = logging.getLogger(__name__)

MAX_WAITING = 100
"""Images that wait for a process."""

KEPT_RESULTS = 4096
"""Digests and grids that are kept, for images that come again with each turn of a conversation."""

START_SECONDS = 60.0
IMAGE_SECONDS = 60.0
"""The time that passes on a clock until an image is given up, on a busy machine, too."""

IDLE_SECONDS = 600.0
"""After this time without images the processes end. Each takes 90 MB."""

RETRY_SECONDS = 10
"""Until a client may try again where no process starts."""

LOOK_SECONDS = 0.25
"""Between two looks at the memory of a process on macOS, which enforces no limit."""

MAX_ATTEMPTS = 2
"""Of an image whose process was ended from outside, which says little of the image."""

READ_BYTES = 1 << 16

LAST_WORDS_SECONDS = 1.0
"""Until the exit code of a process is there that has closed its socket."""

Start: TypeAlias = "Callable[[], tuple[socket.socket, subprocess.Popen[bytes]]]"
"""Starts a worker process. Returns the socket to it, and the process. Raises OSError."""

Result: TypeAlias = tuple[bytes, tuple[int, ...]]
"""The digest and the grid of a prepared image."""

Key: TypeAlias = tuple[str | int, ...]
"""What a result depends on."""

_VARIABLES = {
    "OPENBLAS_NUM_THREADS": "1",  # each thread takes address space
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
}


class WorkerProcess:
    """A process of `engine.images.worker`. Belongs to the event loop on which it is opened."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._frames = FrameBuffer()
        self.pid = process.pid

    @classmethod
    async def open(cls, start: Start) -> "WorkerProcess":
        """Returns when the process is ready. Raises OSError, EOFError and ProtocolError where it
        does not start.
        """
        connection, process = await asyncio.to_thread(start)
        worker = cls(process, *await asyncio.open_connection(sock=connection))
        try:
            async with asyncio.timeout(START_SECONDS):
                await worker._report()
        except BaseException:
            await worker.kill()
            raise
        return worker

    async def ask(self, job: PrepareJob) -> PrepareReport:
        """The report of a job. Raises EOFError, OSError or ProtocolError where the process has
        ended, or sends nonsense, and MemoryError on macOS.
        """
        self._writer.write(job.frame())
        await self._writer.drain()
        return await self._report()

    async def _report(self) -> PrepareReport:
        while True:
            data = b""
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    if not (data := await self._reader.read(READ_BYTES)):
                        raise EOFError("the process has closed its socket")
            for body in self._frames.add(data):
                return PrepareReport.read(body)
            if (footprint_bytes(self.pid) or 0) > MEMORY_BYTES:
                raise MemoryError

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    async def kill(self) -> int:
        """End it, whatever it does. Waits for that, and returns its exit code: its own, if it has
        ended before.
        """
        if self._reader.at_eof():  # it ends by itself, and its exit code tells why
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, LAST_WORDS_SECONDS)
        self._process.kill()
        self._writer.close()
        return await asyncio.to_thread(self._process.wait)


def start_worker(checkpoint: Path) -> "tuple[socket.socket, subprocess.Popen[bytes]]":
    """Start a process for the images of a checkpoint. Raises OSError."""
    return start_child(
        "engine.images.worker",
        str(checkpoint),
        errors=subprocess.DEVNULL,
        variables=_VARIABLES,
    )


@dataclass(eq=False, slots=True)
class _Waiting:
    """An image that waits or is prepared, and how many callers wait for it."""

    key: Key
    job: PrepareJob
    result: "asyncio.Future[Result]"
    n_callers: int = 0


class ImageQueue:
    """Prepares the images of a checkpoint. For one event loop.

    Processes start with the first image. Callers that want the same image wait for the same job.
    """

    def __init__(
        self,
        checkpoint: Path,
        layout: ImageLayout,
        *,
        start: Callable[[Path], "tuple[socket.socket, subprocess.Popen[bytes]]"] = start_worker,
        n_processes: int = 0,
        max_waiting: int = MAX_WAITING,
        image_seconds: float = IMAGE_SECONDS,
    ) -> None:
        """Without `n_processes`, there are as many as the machine has room for."""
        self._start: Start = partial(start, checkpoint)
        self._layout = layout
        self._n_processes = n_processes or min(max((os.cpu_count() or 1) // 8, 1), 4)
        self._max_waiting = max_waiting
        self._image_seconds = image_seconds
        self._jobs: dict[Key, _Waiting] = {}
        self._waiting = deque[_Waiting]()
        self._idle: list[WorkerProcess] = []
        self._tasks = set[asyncio.Task[None]]()
        self._kills = set[asyncio.Task[int]]()
        self._results = OrderedDict[Key, Result]()
        self._seconds_each = 1.0  # a moving mean
        self._ending: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def prepare(self, source: str, folder: str, detail: Detail) -> PreparedImage:
        """See `engine.api.Engine.prepare_image`. Raises InvalidImage, ImagesBusy and
        EngineStopped.
        """
        if self._is_closed:
            raise EngineStopped("the engine has stopped")
        job = PrepareJob(source, folder, detail)
        key = _key(job)
        found = self._results.get(key)
        if found is None or not (Path(folder) / array_file(found[0])).exists():
            found = await self._joined(key, job)
        self._results[key] = found
        self._results.move_to_end(key)
        if len(self._results) > KEPT_RESULTS:
            self._results.popitem(last=False)
        digest, grid = found
        return self._layout.prepared(digest, grid, str(Path(folder) / array_file(digest)))

    async def close(self) -> None:
        """End the processes. Callers get EngineStopped."""
        self._is_closed = True
        for waiting in tuple(self._jobs.values()):
            self._finish(waiting, EngineStopped("the engine has stopped"))
        self._waiting.clear()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end_idle()
        await asyncio.gather(*self._kills)

    async def _joined(self, key: Key, job: PrepareJob) -> Result:
        """The result of a job, perhaps of one that another caller waits for."""
        waiting = self._jobs.get(key)
        if waiting is None:
            if len(self._waiting) >= self._max_waiting:
                seconds = self._seconds_each * len(self._waiting) / self._n_processes
                raise ImagesBusy(
                    f"{len(self._waiting)} images wait to be decoded, the most that may",
                    max(math.ceil(seconds), 1),
                )
            result = asyncio.get_running_loop().create_future()
            waiting = self._jobs[key] = _Waiting(key, job, result)
            if len(self._tasks) < self._n_processes:
                self._tasks.add(asyncio.get_running_loop().create_task(self._work(waiting)))
            else:
                self._waiting.append(waiting)
        waiting.n_callers += 1
        try:
            return await asyncio.shield(waiting.result)
        finally:
            waiting.n_callers -= 1
            if not waiting.n_callers and waiting in self._waiting:
                self._waiting.remove(waiting)
                del self._jobs[key]

    async def _work(self, waiting: _Waiting) -> None:
        """Prepare an image, and then others until none waits."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                outcome: Result | Exception = await self._outcome(waiting.job)
            except (InvalidImage, ImagesBusy) as error:
                outcome = error
            except Exception as error:
                logger.exception("an image could not be prepared")
                outcome = error
            self._finish(waiting, outcome)
            self._seconds_each += 0.2 * (loop.time() - began - self._seconds_each)
            if not self._waiting:
                break
            waiting = self._waiting.popleft()
        if self._ending is not None:
            self._ending.cancel()
        self._ending = loop.call_later(IDLE_SECONDS, self._end_idle)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.discard(task)  # at once: the next image begins another

    def _finish(self, waiting: _Waiting, outcome: Result | Exception) -> None:
        self._jobs.pop(waiting.key, None)
        if waiting.result.done():
            return
        if isinstance(outcome, Exception):
            waiting.result.set_exception(outcome)
            waiting.result.exception()  # it counts as seen if all callers have gone
        else:
            waiting.result.set_result(outcome)

    def _end_idle(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        for process in self._idle:
            task = asyncio.get_running_loop().create_task(process.kill())
            self._kills.add(task)
            task.add_done_callback(self._kills.discard)
        self._idle.clear()

    async def _outcome(self, job: PrepareJob) -> Result:
        """The digest and the grid of an image. Raises InvalidImage, and ImagesBusy where no process
        starts.
        """
        for _ in range(MAX_ATTEMPTS):
            process = await self._process()
            try:
                async with asyncio.timeout(self._image_seconds):
                    report = await process.ask(job)
            except BaseException as error:
                code = await process.kill()
                (Path(job.folder) / unfinished_file(process.pid)).unlink(missing_ok=True)
                if isinstance(error, TimeoutError):
                    raise _refused(f"decoding it takes over {self._image_seconds:g} s") from error
                if isinstance(error, MemoryError):
                    raise _refused("it takes too much memory to decode") from error
                if isinstance(error, ProtocolError):
                    raise _refused("the process that decodes it sends nonsense") from error
                if not isinstance(error, EOFError | OSError):
                    raise
                logger.warning("a process that decodes images was lost: %s", ending(code))
                if code != -signal.SIGKILL:
                    raise _refused(_cause(code)) from error
            else:
                self._idle.append(process)
                return self._checked(report)
        raise _refused("the process that decodes it was ended from outside, twice")

    def _checked(self, report: PrepareReport) -> Result:
        """The digest and grid of a report, if they are possible ones."""
        if report.error:
            raise _refused(report.error)
        try:
            if len(report.digest) != 32:
                raise ValueError("no digest")
            self._layout.prepared(report.digest, report.grid, "")
        except ValueError as error:
            raise _refused(f"the model takes no such image: {error}") from error
        return report.digest, report.grid

    async def _process(self) -> WorkerProcess:
        """A process that is ready. Raises ImagesBusy."""
        while self._idle:
            process = self._idle.pop()
            if process.is_running:
                return process
            await process.kill()
        try:
            return await WorkerProcess.open(self._start)
        except (EOFError, OSError, ProtocolError, MemoryError) as error:  # TimeoutError, too
            logger.error("the process that decodes images does not start: %s", one_line(error))
            raise ImagesBusy(
                f"the process that decodes images does not start: {one_line(error)}", RETRY_SECONDS
            ) from error


def _key(job: PrepareJob) -> Key:
    """What the result of a job depends on. Raises InvalidImage for a file that is not there, and
    for one outside of the folder.
    """
    with suppress(OSError):
        source, folder = Path(job.source).resolve(strict=True), Path(job.folder).resolve()
        if source.is_relative_to(folder) and source.is_file():
            state = source.stat()
            return (job.folder, job.source, state.st_size, state.st_mtime_ns, job.detail)
    raise _refused("it is no longer stored")


def _refused(reason: str) -> InvalidImage:
    return InvalidImage(f"the image is refused: {reason}")


def _cause(code: int) -> str:
    """Why a process has ended with this exit code, in words for a client."""
    if code == -signal.SIGXCPU:
        return f"decoding it takes over {PROCESSOR_SECONDS} s of processor time"
    return f"the process that decoded it has ended with {ending(code)}"
