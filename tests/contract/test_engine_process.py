"""An engine's process that ends, hangs, or outlives its server."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from engine.api import EngineStopped
from engine.launch import launch
from engine.process.sockets import FrameBuffer, socket_pair
from engine.remote import connection
from engine.remote import engine as remote_engine
from engine.remote.calls import Calls
from engine.remote.engine import RemoteEngine
from engine.remote.wire import CallMessage, Kind, read_frame
from engine.values.output import FinishReason, OutputEvent
from engine.values.request import Constraint, Grammar, GrammarKind, Request
from engine.values.settings import EngineConfig
from engine.values.tokens import pack
from tests.polling import until
from tools.events import events_of

pytestmark = pytest.mark.process

PATIENCE = 60.0
CONFIG = EngineConfig(model="", kv_cache_bytes=16 << 20)
LONG = Request("long", pack((5, 6, 7)), 3000, ignore_eos=True)
WITHOUT_MLX = """
import sys
import server.app, server.terminal.serve
from engine.launch import launch
from engine.text.tokenizer import CheckpointTokenizer
print(sorted(name for name in sys.modules if name.split(".")[0] in ("mlx", "mlx_lm")))
"""
LOADER = """
import logging, sys, threading
from engine.remote.host import main

never = threading.Event()

def waits():
    never.wait()

def computes():
    while True:
        pass

def holds_the_lock_of_the_log():
    logging.getLogger().handlers[0].acquire()
    never.wait()

def has_a_thread_that_never_ends():
    threading.Thread(target=never.wait).start()
    raise RuntimeError

def start(config, report, deliver, ended):
    report("begun")
    globals()[sys.argv[2]]()

main(int(sys.argv[1]), start)
"""
KEEPER = """
import asyncio, sys
from engine.launch import launch
from tests.contract.test_engine_process import CONFIG, pid_of
print(pid_of(asyncio.run(launch(CONFIG, lambda line: None))), flush=True)
sys.stdin.read()
"""


def launched() -> RemoteEngine:
    engine = asyncio.run(launch(CONFIG, lambda line: None))
    assert isinstance(engine, RemoteEngine)
    return engine


def pid_of(engine: object) -> int:
    assert isinstance(engine, RemoteEngine)
    process = engine.connection._process
    assert isinstance(process, subprocess.Popen)
    return process.pid


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[RemoteEngine]:
    made = await launch(CONFIG, lambda line: None)
    assert isinstance(made, RemoteEngine)
    yield made
    await made.drain(0.0)


async def begun(engine: RemoteEngine, answer: list[OutputEvent]) -> "asyncio.Task[None]":
    """A request that has its first token."""
    first = asyncio.Event()

    async def collect() -> None:
        async for event in events_of(engine, LONG):
            answer.append(event)
            first.set()

    task = asyncio.ensure_future(collect())
    await asyncio.wait_for(first.wait(), PATIENCE)
    return task


async def test_a_killed_process_ends_its_streams_and_no_more(engine: RemoteEngine) -> None:
    answer: list[OutputEvent] = []
    task = await begun(engine, answer)
    os.kill(pid_of(engine), signal.SIGKILL)
    with pytest.raises(EngineStopped):
        await asyncio.wait_for(task, PATIENCE)
    assert not engine.is_alive()
    with pytest.raises(EngineStopped):
        await engine.requests()
    stats = await engine.stats()
    assert stats.sequences.finished[FinishReason.ERROR] == 1


@pytest.mark.slow
async def test_a_process_that_says_nothing_any_more_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "SILENT_SECONDS", 5.0)
    engine = await asyncio.to_thread(launched)
    answer: list[OutputEvent] = []
    task = await begun(engine, answer)
    os.kill(pid_of(engine), signal.SIGSTOP)
    with pytest.raises(EngineStopped):
        await asyncio.wait_for(task, PATIENCE)
    await asyncio.wait_for(engine.drain(0.0), PATIENCE)


@pytest.mark.slow
async def test_who_only_looks_does_not_wait_for_a_stopped_process(
    engine: RemoteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer: list[OutputEvent] = []
    task = await begun(engine, answer)
    before = await engine.stats()
    (running,) = await engine.requests()
    monkeypatch.setattr(remote_engine, "ANSWER_SECONDS", 0.05)
    os.kill(pid_of(engine), signal.SIGSTOP)
    try:
        stats = await asyncio.wait_for(engine.stats(), PATIENCE)
        (info,) = await asyncio.wait_for(engine.requests(), PATIENCE)
        assert engine.is_alive(), "nobody has ended it meanwhile"
    finally:
        os.kill(pid_of(engine), signal.SIGCONT)
    assert stats.sequences.live == 1
    assert stats.generated_tokens >= before.generated_tokens
    assert info.request_id == running.request_id
    await asyncio.wait_for(task, PATIENCE)
    assert answer[-1].finish_reason is FinishReason.LENGTH
    monkeypatch.undo()
    assert await engine.requests() == ()
    assert (await engine.stats()).generated_tokens == LONG.max_tokens


@pytest.mark.parametrize("last_sequence", ["reaches its limit", "is aborted"])
async def test_an_idle_engine_sleeps(engine: RemoteEngine, last_sequence: str) -> None:
    """Of its threads only the first wakes, to report that it is alive. Threads that look at
    something again and again would wake between two such reports.
    """
    guided = Constraint(Grammar(GrammarKind.REGEX, "[a-z]{2000}"), "guided_regex")
    is_aborted = last_sequence == "is aborted"
    one = replace(LONG, constraint=guided, max_tokens=2000 if is_aborted else 8)
    async with aclosing(events_of(engine, one)) as events:
        n_events = 0
        async for _ in events:
            n_events += 1
            if is_aborted and n_events == 4:
                break
    while await engine.requests():
        pass
    pid = pid_of(engine)
    await asyncio.to_thread(until, lambda: _wakes_in_a_report(pid) == 0)


def _wakes_in_a_report(pid: int) -> int:
    """How often threads wake while the process reports twice, besides the first thread."""
    before = _wakes(pid)
    until(lambda: _wakes(pid).get(pid, 0) >= before.get(pid, 0) + 2 or not before)
    after = _wakes(pid)
    return sum(
        n_wakes - before.get(thread, 0) for thread, n_wakes in after.items() if thread != pid
    )


def _wakes(pid: int) -> dict[int, int]:
    """How often each thread has slept so far. Nothing is known of that except on Linux."""
    found = dict[int, int]()
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with suppress(OSError):  # the thread has ended
            _, _, rest = status.read_text().partition("\nvoluntary_ctxt_switches:")
            found[int(status.parent.name)] = int(rest.split()[0])
    return found


async def test_drained_it_is_gone(engine: RemoteEngine) -> None:
    answer: list[OutputEvent] = []
    task = await begun(engine, answer)
    await asyncio.wait_for(engine.drain(0.0), PATIENCE)
    await task
    assert answer[-1].finish_reason is FinishReason.ABORT
    with pytest.raises(ProcessLookupError):
        os.kill(pid_of(engine), 0)


def test_it_ends_with_its_server() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        server.kill()
    end = asyncio.run(_ended(pid))
    assert end


@pytest.mark.parametrize(
    "load",
    ["waits", "computes", "holds_the_lock_of_the_log", "has_a_thread_that_never_ends"],
)
def test_it_ends_with_its_server_whatever_its_threads_do(load: str) -> None:
    """The model is still being loaded."""
    ours, theirs = socket_pair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", LOADER, str(theirs.fileno()), load], pass_fds=[theirs.fileno()]
        )
    try:
        with ours:
            ours.sendall(CallMessage(1, "load", Calls.load.json(CONFIG, logging.WARNING)).frame())
            frames, kinds = FrameBuffer(), set[int]()
            while Kind.LINE not in kinds:
                kinds |= {read_frame(body)[0] for body in frames.add(ours.recv(1 << 16))}
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()


async def _ended(pid: int) -> bool:
    async with asyncio.timeout(PATIENCE):
        while _runs(pid):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return True


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_server_imports_no_mlx() -> None:
    said = subprocess.run(
        [sys.executable, "-c", WITHOUT_MLX], capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == "[]"
