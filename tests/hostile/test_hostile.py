"""Hostile requests beside a probe: the daemon lives, says 200 or 400, and nobody waits for them."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Iterator
from itertools import cycle
from pathlib import Path

import httpx
import psutil
import pytest
import pytest_asyncio

from tests.hostile.cases import (
    CHAT,
    COMPLETIONS,
    ENDLESS,
    MESSAGES,
    MULTIPLE,
    THROUGH,
    Case,
    chain,
    chat,
    completion,
    dear_later,
    empty,
    in_all_dialects,
    named,
)
from tests.hostile.daemons import HOSTILE, PROBE, client, daemon, grammar_processes, is_alive, send
from tests.hostile.drawing import Drawer
from tests.hostile.probe import HELD, probing
from tests.restart.asking import PATIENCE
from tests.restart.living import Daemon

STALL_SECONDS = 10.0
"""On a machine that does much else: a stall that is ours is longer. `make hostile` measures."""

DRAWN = 25
SEED = 0

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.process, pytest.mark.slow]


@pytest.fixture(scope="module")
def living(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(tmp_path_factory.mktemp("daemon")) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def hostile(living: Daemon) -> AsyncIterator[httpx.AsyncClient]:
    async with client(living, HOSTILE) as http:
        yield http


@pytest_asyncio.fixture(loop_scope="module")
async def harmless(living: Daemon) -> AsyncIterator[httpx.AsyncClient]:
    async with client(living, PROBE) as http:
        yield http


async def beside(
    cases: list[Case], hostile: httpx.AsyncClient, harmless: httpx.AsyncClient
) -> list[int]:
    """Their statuses, sent all at once beside a probe that nobody keeps waiting."""
    async with probing(harmless) as waits:
        statuses = await asyncio.gather(*(send(hostile, case) for case in cases))
        await waits.grow()
        assert max(waits.worst().values()) < STALL_SECONDS, waits.worst()
    assert await is_alive(harmless)
    return list(statuses)


async def test_chains_of_references(
    hostile: httpx.AsyncClient, harmless: httpx.AsyncClient
) -> None:
    """Each in one dialect; `make hostile` has all."""
    dialects = cycle(range(5))
    cases = [in_all_dialects(through, chain(through))[next(dialects)] for through in THROUGH]
    await beside(cases, hostile, harmless)


async def test_whatever_takes_long(hostile: httpx.AsyncClient, harmless: httpx.AsyncClient) -> None:
    cases = random.Random(SEED).sample(list(named()), 5)
    await beside(cases, hostile, harmless)


async def test_another_clients_grammar_is_read_while_nine_wait(
    hostile: httpx.AsyncClient, harmless: httpx.AsyncClient
) -> None:
    """One client has one trial at a time."""
    formats = [
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {**MULTIPLE, "title": at}}}
        for at in map(str, range(9))
    ]
    waiting = [
        asyncio.ensure_future(send(hostile, chat("a multiple", response_format=one)))
        for one in formats
    ]
    await asyncio.sleep(0)
    answer = await harmless.post(CHAT, json=HELD)
    assert answer.status_code == httpx.codes.OK
    assert not all(one.done() for one in waiting)
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert await is_alive(harmless)


async def test_masks_that_become_dear_keep_nobody_waiting(
    hostile: httpx.AsyncClient, harmless: httpx.AsyncClient
) -> None:
    told = await hostile.post("/tokenize", json={"prompt": "x", "add_special_tokens": False})
    (x,) = told.raise_for_status().json()["tokens"]
    dear = {"logit_bias": {str(x): 100}, "max_tokens": 120}
    cases = [
        completion(f"{times} times dear", guided_grammar=dear_later(times), **dear)
        for times in (25, 60, 400)
    ]
    statuses = await beside(cases, hostile, harmless)
    assert 400 in statuses  # none is given more than its time


@pytest.mark.parametrize("name", ["six levels of repetition", "eight levels of repetition"])
async def test_levels_of_repetition_are_refused(hostile: httpx.AsyncClient, name: str) -> None:
    pattern = ENDLESS[name]
    assert await send(hostile, completion(name, guided_regex=pattern)) == 400
    schema = {"type": "string", "pattern": f"^{pattern}$"}
    told = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert await send(hostile, chat(name, response_format=told)) == 400


async def test_what_is_refused_is_refused_where_nothing_is_generated(
    hostile: httpx.AsyncClient,
) -> None:
    for bad in ({"guided_regex": "("}, {"guided_grammar": "start: a"}):
        asked = [
            Case("completion", path, {"prompt": "a", **bad})
            for path in (COMPLETIONS, f"{COMPLETIONS}/render")
        ] + [Case("chat", path, {"messages": MESSAGES, **bad}) for path in (CHAT, f"{CHAT}/render")]
        assert [await send(hostile, case) for case in asked] == [400] * 4


async def test_drawn_at_random(hostile: httpx.AsyncClient, harmless: httpx.AsyncClient) -> None:
    await beside([Drawer(SEED + at).case() for at in range(DRAWN)], hostile, harmless)


async def test_processes_that_are_killed_again_and_again_change_no_answer(
    living: Daemon, harmless: httpx.AsyncClient
) -> None:
    body = {
        "prompt": "a",
        "max_tokens": 60,
        "temperature": 1,
        "seed": 3,
        "guided_regex": "[a-z ]{200,}",
        "speculate": False,  # or the second answer, which is known, comes in a piece or two
    }
    expected = (await harmless.post(COMPLETIONS, json=body)).raise_for_status().json()
    said, n_pieces, n_killed = "", 0, 0
    async with harmless.stream("POST", COMPLETIONS, json={**body, "stream": True}) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            piece = httpx.Response(200, content=line.removeprefix("data: ")).json()
            said += piece["choices"][0]["text"] if piece["choices"] else ""
            n_pieces += 1
            if n_pieces % 6 == 0:  # some tokens come between: three deaths without are an end
                for process in grammar_processes(living):
                    process.kill()
                    n_killed += 1
    assert n_killed >= 12
    assert said == expected["choices"][0]["text"]


async def test_each_worker_killed_once_changes_no_token_of_twenty_streams(
    living: Daemon, harmless: httpx.AsyncClient
) -> None:
    """A stream goes on, or ends with an error."""
    bodies = [
        {
            "prompt": "a",
            "max_tokens": 40,
            "temperature": 1,
            "seed": seed,
            "guided_regex": f"[a-z ]{{{100 + seed % 4},}}",
            "speculate": False,
        }
        for seed in range(20)
    ]

    async def said(body: dict[str, object]) -> str:
        answer = (await harmless.post(COMPLETIONS, json=body)).raise_for_status().json()
        return str(answer["choices"][0]["text"])

    expected = await asyncio.gather(*map(said, bodies))
    texts, n_errors = [""] * len(bodies), 0

    async def stream(number: int) -> None:
        nonlocal n_errors
        body = {**bodies[number], "stream": True}
        async with harmless.stream("POST", COMPLETIONS, json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    piece = httpx.Response(200, content=line.removeprefix("data: ")).json()
                    n_errors += "error" in piece
                    for choice in piece.get("choices", ()):
                        texts[number] += choice["text"]

    streams = [asyncio.ensure_future(stream(number)) for number in range(len(bodies))]
    killed = set[int]()
    for n_characters in (100, 500, 900, 1300):
        while (  # noqa: ASYNC110
            sum(map(len, texts)) < n_characters and not all(one.done() for one in streams)
        ):
            await asyncio.sleep(0.002)
        alive = [one for one in grammar_processes(living) if one.pid not in killed]
        if alive:
            killed.add(alive[0].pid)
            alive[0].kill()
    await asyncio.gather(*streams)
    assert len(killed) >= 2
    assert n_errors <= 1
    for text, whole in zip(texts, expected, strict=True):
        assert text == whole or (n_errors and whole.startswith(text))


async def test_none_is_left_and_none_is_kept(living: Daemon, harmless: httpx.AsyncClient) -> None:
    """Three workers and one that has begun to start, beside the engine. Some may have been killed,
    and not been missed yet.
    """
    (await harmless.post(CHAT, json=HELD)).raise_for_status()
    assert len(psutil.Process(living.process.pid).children(recursive=True)) <= 5
    assert grammar_processes(living)


async def test_a_signal_ends_the_daemon_while_grammars_are_read(tmp_path: Path) -> None:
    with daemon(tmp_path, "--drain-timeout-seconds", "1") as ending:
        async with client(ending, HOSTILE) as http:
            (await http.post(CHAT, json=HELD)).raise_for_status()  # so that processes run
            cases = [completion("nothing", guided_grammar=empty(1000 + at)) for at in range(9)]
            asked = [asyncio.ensure_future(http.post(one.path, json=one.body)) for one in cases]
            (await http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 2})).raise_for_status()
            asked[0].cancel()
            processes = grammar_processes(ending)
            assert processes
            ending.process.send_signal(signal.SIGTERM)
            status = await asyncio.to_thread(ending.process.wait, PATIENCE)
            await asyncio.gather(*asked, return_exceptions=True)
    assert status == 0, (tmp_path / "log").read_text()
    _, left = psutil.wait_procs(processes, timeout=PATIENCE)
    assert not left


async def test_a_daemon_that_is_killed_leaves_none(tmp_path: Path) -> None:
    with daemon(tmp_path) as dying:
        async with client(dying, PROBE) as http:
            (await http.post(CHAT, json=HELD)).raise_for_status()
        processes = grammar_processes(dying)
        assert processes
        dying.kill()
    _, left = psutil.wait_procs(processes, timeout=PATIENCE)
    assert not left


async def test_where_no_process_starts_free_rows_go_on(tmp_path: Path) -> None:
    program = ("-m", "tests.hostile.lone_daemon")
    with daemon(tmp_path, program=program) as lone:
        async with client(lone, PROBE) as http:
            held = await http.post(CHAT, json=HELD)
            assert held.status_code == 503
            assert held.json()["error"]["code"] == "grammars_unavailable"
            free = await http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 2})
            assert free.status_code == httpx.codes.OK
            assert await is_alive(http)
