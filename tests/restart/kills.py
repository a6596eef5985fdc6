"""Daemons with one directory after the other, each killed under load."""

import asyncio
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from kvstore.disk import store as maintenance
from kvstore.disk.folder import LOCK
from load_tests.processes import free_port
from tests.restart.asking import PATIENCE, Heard, ask, client
from tests.restart.living import (
    LIMIT_BYTES,
    SERVE,
    Daemon,
    DiskWatch,
    checkpoint,
    disk_flags,
    du,
    living,
)
from tests.restart.questions import Load, Question, Writer

ASKERS = 6
LONGEST_LIFE = 2.5
"""Seconds from the first question to the kill, at most: idle conversations are due after one."""

OPENING = 0.1
"""The part of the daemons that are killed while they open the directory."""


def run(family: str, n_kills: int, seed: int, load: Load) -> int:
    """How many answers were right. AssertionError of the first that is not, and of all else."""
    randomness = random.Random(seed)
    with TemporaryDirectory(prefix="restart-") as scratch:
        folder = Path(scratch)
        model = checkpoint(family, folder)
        questions = asyncio.run(answered(model, folder / "log", load, seed))
        print(f"{family}, seed {seed}: {len(questions)} questions", flush=True)
        lives = Lives(model, folder, questions, randomness)
        for life in range(n_kills):
            print(f"{family}, seed {seed}, life {life}: {lives.live_and_die()}", flush=True)
        print(f"{family}, seed {seed}: {asyncio.run(lives.last())}", flush=True)
        return lives.answers


async def answered(model: Path, log: Path, load: Load, seed: int) -> list[Question]:
    """What a daemon says that keeps nothing, neither in memory nor on disk."""
    with living(model, log, "--no-prefix-cache") as daemon:
        async with client(daemon.url) as http:
            return [found async for found in Writer(http, model, load, seed).questions()]


async def put(http: httpx.AsyncClient, question: Question) -> Heard:
    """Ask one, and check what is heard of the answer, however it ends."""
    heard = Heard()
    try:
        await ask(http, question.prompt, len(question.expected.tokens), heard)
    finally:
        question.check(heard)
    assert heard.is_whole, "an answer ended before its end"
    return heard


async def put_all(
    daemon: Daemon, questions: Sequence[Question], randomness: random.Random
) -> list[Heard]:
    """In any order, a few at a time."""
    turns = asyncio.Semaphore(ASKERS)

    async def one(http: httpx.AsyncClient, question: Question) -> Heard:
        async with turns:
            return await put(http, question)

    shuffled = randomness.sample(questions, len(questions))
    async with client(daemon.url) as http, asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(http, question)) for question in shuffled]
    return [task.result() for task in tasks]


class Lives:
    """Of daemons on one directory."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        questions: Sequence[Question],
        randomness: random.Random,
    ) -> None:
        self._model = model
        self._log = folder / "log"
        self._directory = folder / "kv"
        self._questions = questions
        self._random = randomness
        self.answers = self.cut = self.loaded_tokens = 0

    def live_and_die(self) -> str:
        """What came of it, for people."""
        with DiskWatch(self._directory) as watch:
            if self._directory.exists() and self._random.random() < OPENING:
                told = self._die_young()
            else:
                told = asyncio.run(self._die_at_work())
        self._examine()
        return f"{told}; du {watch.most_bytes:,} at most, {watch.samples} samples"

    async def die_after_writing(self, n_bytes: int) -> None:
        """Killed at work, as soon as so much is on disk."""
        flags = disk_flags(self._directory, write="all")
        with DiskWatch(self._directory), living(self._model, self._log, *flags) as daemon:
            async with self._asking(daemon):
                await asyncio.to_thread(daemon.wait_for_disk, n_bytes)
                daemon.kill()
        self._examine()

    async def last(self, faults: Collection[str] = ()) -> str:
        """One that is not killed answers everything, and notices what is wrong."""
        with (
            DiskWatch(self._directory),
            living(self._model, self._log, *disk_flags(self._directory)) as daemon,
        ):
            heard = await put_all(daemon, self._questions, self._random)
            self._take_note(daemon, faults)
        assert du(self._directory) <= LIMIT_BYTES
        assert self.loaded_tokens, "nothing was ever loaded"
        return f"all {len(heard)} asked once more; {self.loaded_tokens} tokens were loaded in all"

    async def _die_at_work(self) -> str:
        before, write = self.answers, self._random.choice(("selective", "all"))
        flags = disk_flags(self._directory, write=write)
        with living(self._model, self._log, *flags) as daemon:
            async with self._asking(daemon):
                seconds = self._random.uniform(0, LONGEST_LIFE)
                await asyncio.sleep(seconds)
                if seconds > LONGEST_LIFE / 2:
                    await asyncio.to_thread(self._take_note, daemon)
                daemon.kill()
        return f"{write}, killed after {seconds:.2f} s and {self.answers - before} answers"

    def _die_young(self) -> str:
        """Killed within a few milliseconds of its having taken the directory."""
        lock = self._directory / LOCK
        flags = ("--port", str(free_port()), *disk_flags(self._directory))
        with self._log.open("wb") as log:
            command = (sys.executable, *SERVE, "--model", str(self._model), *flags)
            process = subprocess.Popen(command, stderr=log)
        deadline = time.monotonic() + PATIENCE
        while lock.read_text().strip() != str(process.pid):
            assert process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.0005)
        seconds = self._random.uniform(0, 0.03)
        time.sleep(seconds)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        return f"killed {seconds * 1000:.1f} ms after it had taken the directory"

    @asynccontextmanager
    async def _asking(self, daemon: Daemon) -> AsyncIterator[None]:
        """Some ask all the time, until the daemon is killed."""
        async with client(daemon.url) as http, asyncio.TaskGroup() as group:
            for _ in range(ASKERS):
                group.create_task(self._ask_until_killed(http, daemon))
            yield

    async def _ask_until_killed(self, http: httpx.AsyncClient, daemon: Daemon) -> None:
        while True:
            try:
                await put(http, self._random.choice(self._questions))
            except httpx.TransportError:
                if not daemon.is_killed:
                    raise
                self.cut += 1
                return
            self.answers += 1

    def _take_note(self, daemon: Daemon, faults: Collection[str] = ()) -> None:
        disk = daemon.disk()
        assert disk["failures"].keys() == set(faults)
        self.loaded_tokens += disk["loaded_tokens"]

    def _examine(self) -> None:
        """What is left is sound: the system lives, so all that was written is there."""
        assert du(self._directory) <= LIMIT_BYTES
        for check in maintenance.verify(self._directory):
            assert check.is_sound, check
