"""The load client and the scenarios that it plays, against a small server, honest and otherwise."""

import asyncio
import hashlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from kvstore.disk.folder import LOCK
from load_tests.__main__ import app
from load_tests.client import Generation, Target, TargetError, discover, exactly
from load_tests.peers.catalogue import Server
from load_tests.processes import Process
from load_tests.scenarios.arrival import Arrived, Gap, gaps_until, play_arrival
from load_tests.scenarios.comeback import play_comeback
from load_tests.scenarios.kinds import (
    Arrival,
    Comeback,
    Load,
    Restart,
    load_scenario,
    scenario_names,
)
from load_tests.scenarios.load import play
from load_tests.scenarios.perform import perform
from load_tests.scenarios.restart import ENDINGS, play_restart
from load_tests.scenarios.workloads import Conversation, Workload, build
from load_tests.shapes import CONFIGS
from load_tests.tokenizer import WORDS, build_tokenizer, word_ids

Body = dict[str, Any]
Respond = Callable[[Body], str]  # request body -> what follows the status line


def stream(*events: object) -> str:
    data = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return "HTTP/1.1 200 OK\r\n\r\n" + "".join(f"data: {d}\n\n" for d in data)


def chunk(text: str | None = None, finish_reason: str | None = None) -> Body:
    delta = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def usage(completion_tokens: int) -> Body:
    counts = {"prompt_tokens": 9, "completion_tokens": completion_tokens}
    return {"choices": [], "usage": {**counts, "prompt_tokens_details": {"cached_tokens": 5}}}


def honest(body: Body) -> str:
    """Says `word` as often as asked."""
    n = body["max_tokens"]
    words = [chunk("word ") for _ in range(n)]
    return stream(chunk(), *words, chunk(finish_reason="length"), usage(n), "[DONE]")


class FakeServer:
    """Answers every request with `respond(body)` and closes, as HTTP/1.0 servers do."""

    def __init__(self, respond: Respond) -> None:
        self.respond = respond
        self.bodies: list[Body] = []
        self.heads: list[str] = []
        self.open = 0
        self.most_open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        body = await self.read_body(reader)
        self.bodies.append(body)
        await asyncio.sleep(0)
        self.open -= 1
        writer.write(self.respond(body).encode())
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def read_body(self, reader: asyncio.StreamReader) -> Body:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        self.heads.append(head)
        _, _, length = head.partition("content-length: ")
        size = int(length.partition("\r\n")[0] or 0)
        return dict(json.loads(await reader.readexactly(size))) if size else {}


@asynccontextmanager
async def served(respond: Respond) -> AsyncIterator[tuple[FakeServer, Target]]:
    fake = FakeServer(respond)
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield fake, Target(f"http://127.0.0.1:{port}/v1", "tiny", stall_seconds=5)


def one(*turns: str, system: str | None = None, output_tokens: int = 3) -> Workload:
    return Workload(1, exactly(output_tokens), ((Conversation(system, turns),),))


async def test_a_conversation_sends_back_what_the_server_said() -> None:
    async with served(honest) as (fake, target):
        run = await play(one("first ", "second ", system="rules "), target)
    assert fake.bodies[1]["messages"] == [
        {"role": "system", "content": "rules "},
        {"role": "user", "content": "first "},
        {"role": "assistant", "content": "word word word "},
        {"role": "user", "content": "second "},
    ]
    assert [a.turn for a in run.answers] == [0, 1]


async def test_a_conversation_asks_for_equal_work_and_names_its_session_to_routers() -> None:
    conversations = (Conversation(None, ("first ", "second ")), Conversation(None, ("other ",)))
    async with served(honest) as (fake, target):
        await play(Workload(1, exactly(1), (conversations,)), target)
    sessions = [re.findall(r"x-session-id: (\S+)", head) for head in fake.heads]
    assert sessions == [["0-0"], ["0-0"], ["0-1"]]
    for body in fake.bodies:
        assert (body["model"], body["max_tokens"], body["ignore_eos"]) == ("tiny", 1, True)
        assert body["temperature"] == 0


async def test_an_answer_keeps_counts_and_times() -> None:
    async with served(honest) as (_, target):
        run = await play(one("hello "), target)
    (found,) = run.answers
    assert (found.prompt_tokens, found.cached_tokens, found.completion_tokens) == (9, 5, 3)
    assert len(found.gap_seconds) == 2
    assert found.started_seconds + found.latency_seconds <= run.wall_seconds
    assert found.first_token_seconds + sum(found.gap_seconds) <= found.latency_seconds


async def test_waves_follow_each_other_and_concurrency_is_a_limit() -> None:
    wave = tuple(Conversation(None, (f"text {i} ",)) for i in range(6))
    async with served(honest) as (fake, target):
        run = await play(Workload(2, exactly(1), (wave, wave)), target)
    assert fake.most_open <= 2
    assert [a.wave for a in run.answers] == [0] * 6 + [1] * 6
    texts = [body["messages"][0]["content"] for body in fake.bodies]
    assert sorted(texts[:6]) == sorted(texts[6:]) == [f"text {i} " for i in range(6)]


async def test_an_answer_may_end_early_where_the_work_says_so() -> None:
    early = stream(chunk("a"), chunk(finish_reason="stop"), usage(2), "[DONE]")
    work = Workload(1, Generation(3, 1, 0.7, seed=5), ((Conversation(None, ("hello ",)),),))
    async with served(lambda body: early) as (fake, target):
        (found,) = (await play(work, target)).answers
    assert (found.text, found.completion_tokens) == ("a", 2)
    (body,) = fake.bodies
    assert (body["temperature"], body["top_p"], body["seed"]) == (0.7, 1.0, 5)
    assert "ignore_eos" not in body


async def test_drafts_are_counted_where_the_server_reports_them() -> None:
    counts = usage(3)
    counts["usage"]["completion_tokens_details"] = {
        "accepted_prediction_tokens": 2,
        "rejected_prediction_tokens": 5,
    }
    answered = stream(chunk("a"), chunk(finish_reason="length"), counts, "[DONE]")
    async with served(lambda body: answered) as (_, target):
        (found,) = (await play(one("hello "), target)).answers
    assert (found.accepted_tokens, found.drafted_tokens) == (2, 7)


@pytest.mark.parametrize(
    ("response", "complaint"),
    [
        ("HTTP/1.1 503 Busy\r\n\r\nno room", "HTTP 503: no room"),
        (stream(chunk("a"), chunk(finish_reason="stop"), usage(1), "[DONE]"), "asked for 3"),
        (stream(chunk("a"), chunk(finish_reason="stop"), usage(3), "[DONE]"), "finish_reason stop"),
        (stream(chunk("a"), chunk(finish_reason="length"), usage(2), "[DONE]"), "got 2"),
        (stream(chunk("a"), chunk(finish_reason="length"), "[DONE]"), "got None"),
        (stream(chunk(finish_reason="length"), usage(3), "[DONE]"), "0 pieces"),
        (stream(chunk("a"), chunk("b")), "without \\[DONE\\] after 2 pieces"),
        (stream(chunk("a"), {"error": {"message": "out of memory"}}), "out of memory"),
        (stream("not json"), "not a chunk of a chat completion: not json"),
        (stream([]), "not a chunk"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\ndata: ", "after 0 pieces of text"),
    ],
)
async def test_anything_but_the_work_asked_for_is_an_error(response: str, complaint: str) -> None:
    async with served(lambda body: response) as (_, target):
        with pytest.raises(TargetError, match=complaint):
            await play(one("hello "), target)


async def test_a_server_that_falls_silent_is_an_error() -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        with pytest.raises(TargetError, match="silent for"):
            await play(one("hello "), Target(url, "tiny", stall_seconds=0.05))
        with pytest.raises(TargetError, match="not done after"):
            await play(one("hello "), Target(url, "tiny", limit_seconds=0.05))


async def test_nobody_listening_is_an_error() -> None:
    async with served(honest) as (_, target):
        gone = target
    with pytest.raises(TargetError, match="ConnectError"):
        await play(one("hello "), gone)


async def test_discover_asks_for_the_first_model_listed() -> None:
    listed = json.dumps({"object": "list", "data": [{"id": "a/b"}, {"id": "c"}]})
    async with served(lambda body: f"HTTP/1.1 200 OK\r\n\r\n{listed}") as (_, target):
        assert (await discover(target.base_url)).model == "a/b"
    async with served(lambda body: 'HTTP/1.1 200 OK\r\n\r\n{"data": []}') as (_, target):
        with pytest.raises(TargetError, match="models"):
            await discover(target.base_url)


CONVERSATIONS = Load(
    description="",
    concurrency=2,
    conversations=5,
    turns=3,
    waves=2,
    system_prompts=2,
    system_words=70,
    user_words=10,
    output_tokens=4,
)


def test_a_seed_gives_the_same_texts_on_every_machine() -> None:
    assert build(CONVERSATIONS, 7) == build(CONVERSATIONS, 7)
    assert build(CONVERSATIONS, 7) != build(CONVERSATIONS, 8)
    digest = hashlib.sha256(repr(build(CONVERSATIONS, 7).waves).encode()).hexdigest()
    assert digest.startswith("62e0b39d6a7f0890")


def test_waves_are_alike_and_deal_system_prompts_in_turn() -> None:
    first, second = build(CONVERSATIONS, 0).waves
    assert first == second
    systems = [conversation.system for conversation in first]
    assert systems[0] == systems[2] == systems[4] != systems[1] == systems[3]
    assert len({text for conversation in first for text in conversation.turns}) == 15
    alone = CONVERSATIONS.model_copy(update={"system_prompts": 0, "waves": 1})
    (wave,) = build(alone, 0).waves
    assert {conversation.system for conversation in wave} == {None}


def test_a_word_is_a_token_and_text_comes_back_to_the_same_tokens() -> None:
    tokenizer = build_tokenizer()
    ids = word_ids(tokenizer)
    assert len(set(ids)) == len(WORDS)
    assert tokenizer.encode("".join(f"{word} " for word in WORDS)).ids == ids
    assert tokenizer.encode(tokenizer.decode(ids)).ids == ids


@pytest.mark.parametrize("size", {config["vocab_size"] for config in CONFIGS.values()})
def test_the_tokenizer_fills_the_vocabulary(size: int) -> None:
    tokenizer = build_tokenizer(size)
    assert tokenizer.get_vocab_size() == size
    assert tokenizer.token_to_id("<|im_end|>") not in word_ids(tokenizer)


def test_the_tokenizer_keeps_every_byte_of_any_text() -> None:
    text = "Größe:\n  x = 3 naïve katofu\tkato 🌱"
    tokenizer = build_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_every_scenario_can_be_read_and_has_a_smaller_one_for_trying_it() -> None:
    for name in scenario_names():
        scenario = load_scenario(name)
        quick = scenario.quick()
        assert scenario.description
        assert type(quick) is type(scenario)
        assert quick != scenario
        if isinstance(scenario, Load):
            assert len(build(scenario, 0).waves[0]) == scenario.conversations
            assert scenario.concurrency <= scenario.conversations


def test_an_unknown_parameter_is_an_error() -> None:
    with pytest.raises(ValidationError, match="user_wrods"):
        Load.model_validate({**CONVERSATIONS.model_dump(), "user_wrods": 3})


ARRIVAL = Arrival(
    kind="arrival", description="", streams=2, stream_words=3, prompt_words=20, output_tokens=2
)


def parts(body: Body) -> list[Body]:
    content = body["messages"][-1]["content"]
    return content if isinstance(content, list) else [{"text": content}]


def words(body: Body) -> list[str]:
    return str(parts(body)[-1]["text"]).split()


class Talking:
    """Streams the answers to short prompts word by word, and answers the long ones at once."""

    def __init__(self, words_said: int) -> None:
        self.words_said = words_said
        self.long_prompts = 0
        self.images: list[str] = []
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
            self.images += [part["image_url"]["url"] for part in parts(body)[:-1]]
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


Lives = list[tuple[Path, Process]]
Play = Callable[[Callable[[Path], AbstractContextManager[Server]]], Any]


async def daemons_of(play: Play) -> tuple[Lives, list[Body], Any]:
    """What a scenario starts, the bodies that it sends there, and what it finds."""
    lives = Lives()
    async with served(honest) as (fake, target):

        @contextmanager
        def start(home: Path) -> Iterator[Server]:
            (home / "kv").mkdir(exist_ok=True)
            (home / "kv" / LOCK).touch()
            with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as it:
                lives.append((home, it))
                yield Server(target, it)

        found = await asyncio.to_thread(play, start)
    return lives, fake.bodies, found


async def test_a_daemon_is_asked_again_by_whom_it_was_and_after_each_of_its_ends() -> None:
    lives, bodies, found = await daemons_of(partial(play_restart, RESTART, 0))
    homes = [home for home, _ in lives]
    assert homes[1] == homes[2] != homes[3] == homes[4] != homes[0]
    ends = [process.returncode for _, process in lives]
    assert (ends[1], ends[3]) == (-signal.SIGTERM, -signal.SIGKILL)
    system, conversation = (body["messages"] for body in bodies[:2])
    assert [one["role"] for one in conversation] == ["user", "assistant", "user"]
    assert (len(system), sum(len(one["content"].split()) for one in conversation)) == (2, 12)
    assert [body["messages"] for body in bodies] == [system, conversation] * 6
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
    lives, bodies, found = await daemons_of(partial(play_comeback, COMEBACK, 0))
    homes = [home for home, _ in lives]
    assert homes[0] == homes[1] != homes[2] == homes[3]
    ends = [process.returncode for _, process in lives]
    assert (ends[0], ends[2]) == (-signal.SIGTERM, -signal.SIGKILL)
    asked = [body["messages"][0]["content"] for body in bodies]
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
