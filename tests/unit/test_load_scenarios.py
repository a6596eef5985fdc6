"""Scenarios that are no plain load, against the load client's fake server."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstore.disk.folder import LOCK
from load_tests.__main__ import app
from load_tests.client import Target, TargetError
from load_tests.peers.catalogue import Server
from load_tests.processes import Process
from load_tests.scenarios.arrival import Arrived, Gap, gaps_until, play_arrival
from load_tests.scenarios.comeback import play_comeback
from load_tests.scenarios.kinds import (
    Arrival,
    Comeback,
    Restart,
)
from load_tests.scenarios.perform import perform
from load_tests.scenarios.restart import ENDINGS, play_restart
from tests.unit.test_load_client import chunk, honest, served

ARRIVAL = Arrival(
    kind="arrival", description="", streams=2, stream_words=3, prompt_words=20, output_tokens=2
)


def words(body: dict[str, list[dict[str, str]]]) -> list[str]:
    return body["messages"][-1]["content"].split()


class Talking:
    """Streams the answers to short prompts word by word, and answers the long ones at once."""

    def __init__(self, words_said: int) -> None:
        self.words_said = words_said
        self.long_prompts = 0
        self._answers = set[asyncio.Task[None] | None]()

    @asynccontextmanager
    async def served(self) -> AsyncIterator[Target]:
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            yield Target(f"http://127.0.0.1:{port}/v1", "tiny", stall_seconds=60)
            await asyncio.gather(*(answer for answer in self._answers if answer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._answers.add(asyncio.current_task())
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        _, _, length = head.partition("content-length: ")
        body = json.loads(await reader.readexactly(int(length.partition("\r\n")[0])))
        if len(words(body)) == ARRIVAL.prompt_words:
            self.long_prompts += 1
            writer.write(honest(body).encode())
        else:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            for _ in range(self.words_said):
                writer.write(f"data: {json.dumps(chunk('word '))}\n\n".encode())
                await asyncio.sleep(0.001)
                if writer.is_closing():
                    break
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def test_a_long_prompt_is_asked_alone_and_beside_streams_which_are_cut() -> None:
    talking = Talking(words_said=100_000)
    async with talking.served() as target:
        found = await perform(ARRIVAL, 0, target)
    assert isinstance(found, Arrived)
    assert talking.long_prompts == 3  # the first is a warm-up
    assert found.worst_gap == max(gap.lasted for gap in found.gaps)
    assert found.prompt_tokens == 9
    assert found.first_token_beside > 0 < found.first_token_alone


async def test_streams_that_end_before_the_long_prompt_is_answered_are_an_error() -> None:
    async with Talking(words_said=3).served() as target:
        with pytest.raises(TargetError, match="stream ended"):
            await play_arrival(ARRIVAL, 0, target)


def test_a_gap_counts_when_a_part_of_it_is_in_the_time() -> None:
    heard = [[0.0, 1.0, 2.5, 4.0, 6.0], [5.0, 7.0]]
    assert gaps_until(2.0, 5.5, heard) == (
        Gap(0.5, 1.5),
        Gap(2.0, 1.5),
        Gap(4.0, 2.0),
        Gap(5.0, 2.0),
    )


RESTART = Restart(
    kind="restart",
    description="",
    flags=(),
    system_words=8,
    turns=2,
    prompt_words=12,
    idle_seconds=0,
    output_tokens=3,
)


async def test_a_daemon_is_asked_again_by_whom_it_was_and_after_each_of_its_ends() -> None:
    lives = list[tuple[Path, Process]]()
    async with served(honest) as (fake, target):

        @contextmanager
        def start(home: Path) -> Iterator[Server]:
            with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as it:
                lives.append((home, it))
                yield Server(target, it)

        found = await asyncio.to_thread(play_restart, RESTART, 0, start)
    homes = [home for home, _ in lives]
    assert homes[1] == homes[2] != homes[3] == homes[4] != homes[0]
    ends = [process.returncode for _, process in lives]
    assert (ends[1], ends[3]) == (-signal.SIGTERM, -signal.SIGKILL)
    system, conversation = (body["messages"] for body in fake.bodies[:2])
    assert [one["role"] for one in conversation] == ["user", "assistant", "user"]
    assert (len(system), sum(len(one["content"].split()) for one in conversation)) == (2, 12)
    assert [body["messages"] for body in fake.bodies] == [system, conversation] * 6
    assert [(one.prompt, one.ending) for one in found.resent] == [
        (prompt, ending) for ending in ENDINGS for prompt in ("system prompt", "conversation")
    ]
    assert {found.share(one) for one in found.resent} == {1.0}
    assert all(one.is_same_text for one in found.resent)


COMEBACK = Comeback(
    kind="comeback",
    description="",
    flags=(),
    prompt_words=(12, 20),
    token_bytes=1,
    streams=0,
    stream_words=5,
    crowd=3,
    crowd_words=7,
    idle_seconds=0,
    output_tokens=3,
)


async def test_prompts_come_back_to_the_next_daemon_alone_and_as_a_crowd() -> None:
    lives = list[tuple[Path, Process]]()
    async with served(honest) as (fake, target):

        @contextmanager
        def start(home: Path) -> Iterator[Server]:
            (home / "kv").mkdir(exist_ok=True)
            (home / "kv" / LOCK).touch()
            with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as it:
                lives.append((home, it))
                yield Server(target, it)

        found = await asyncio.to_thread(play_comeback, COMEBACK, 0, start)
    homes = [home for home, _ in lives]
    assert homes[0] == homes[1] != homes[2] == homes[3]
    ends = [process.returncode for _, process in lives]
    assert (ends[0], ends[2]) == (-signal.SIGTERM, -signal.SIGKILL)
    asked = [body["messages"][0]["content"] for body in fake.bodies]
    first, second, third, fourth = (asked[n : n + 7] for n in range(0, 28, 7))
    assert (first[:4], third[:4]) == (second[:4], fourth[:4])
    assert (set(first), set(third)) == (set(second), set(fourth))
    assert [len(words.split()) for words in first] == [12, 20, 12, 20, 7, 7, 7]
    assert [(back.ending, back.streams) for back in found.backs] == [
        (ending, 0) for ending in ("SIGTERM", "SIGKILL") for _ in range(4)
    ]
    assert [len(crowd.again_seconds) for crowd in found.crowds] == [3, 3]


@pytest.mark.parametrize("command", [("compare",), ("run", "--target", "http://127.0.0.1:1/v1")])
def test_a_scenario_that_is_not_there_is_named_beside_those_that_are(
    command: tuple[str, ...],
) -> None:
    said = CliRunner().invoke(app, [*command, "--scenario", "shared", "--scenario", "sharde"])
    assert said.exit_code == 2
    assert "sharde is none of" in said.output
    assert "unique-1" in said.output
