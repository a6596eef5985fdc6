"""Costly values in the fields of all routes. `make hostile` measures how long others wait; here it
counts in which thread a body is read, and how many functions are called for its head.
"""

import cProfile
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import httpx
import pytest
from pydantic import BaseModel

from server import service
from server.errors import ApiError
from server.http.attachments import Attachments
from server.http.body import Head, is_light, parse, read_head
from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine
from tests.hostile.attacks import MOST_BYTES, FieldAttack, field_attacks, largest
from tests.hostile.fields import Field, fields
from tests.hostile.record import Record, Row
from tests.hostile.shapes import Shape, body, shapes
from tests.hostile.storm import TAKEN

MOST_CALLS = 2500
"""Calls of functions for a head that is read on the event loop: a tenth of a millisecond is about
500 of them."""

SIZES = (31 << 10, 8 << 10, 4 << 10, 2 << 10, 1 << 10, 512)
LARGE_BYTES = 40 << 10
SEED = 0
LOOP = "server"
"""The name of the daemon's thread."""

Parse = Callable[[bytes, type[BaseModel], Attachments | None], BaseModel]


@dataclass(slots=True)
class Parses:
    """The bodies that were parsed, and those whose heads were read on the event loop."""

    parse: Parse
    read_head: Callable[[bytes], Head | None]
    heads_on_loop: list[bytes] = field(default_factory=list)
    on_loop: list[bytes] = field(default_factory=list)
    elsewhere: list[bytes] = field(default_factory=list)

    def __call__(
        self, text: bytes, model: type[BaseModel], attachments: Attachments | None = None
    ) -> BaseModel:
        is_loop = threading.current_thread().name == LOOP
        (self.on_loop if is_loop else self.elsewhere).append(text)
        return self.parse(text, model, attachments)

    def head(self, text: bytes) -> Head | None:
        if threading.current_thread().name == LOOP:
            self.heads_on_loop.append(text)
        return self.read_head(text)


def n_calls(parse: Callable[[], object]) -> int:
    """Of functions that are written in Python or called by them."""
    profile = cProfile.Profile()
    with suppress(ApiError):
        profile.runcall(parse)
    return sum(entry.callcount for entry in profile.getstats())


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    settings = Settings(port=0, request_timeout_seconds=20)
    with running(FakeEngine(), settings) as url, httpx.Client(base_url=url, timeout=60) as found:
        yield found


@pytest.fixture(scope="module")
def all_fields(http: httpx.Client) -> list[Field]:
    return list(fields(http.get("/openapi.json").raise_for_status().json()))


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> Parses:
    found = Parses(parse, read_head)
    monkeypatch.setattr(service, "parse", found)
    monkeypatch.setattr(service, "read_head", found.head)
    return found


def test_every_field_is_found(all_fields: list[Field]) -> None:
    found = {(one.route, one.name) for one in all_fields}
    expected = {
        ("/v1/chat/completions", "messages[].content[].text"),
        ("/v1/chat/completions", "messages[].tool_calls[].function.arguments"),
        ("/v1/chat/completions", "guided_json"),
        ("/v1/completions", "prompt[]"),
        ("/v1/messages", "messages[].content[].input"),
        ("/v1/messages/count_tokens", "tools[].input_schema"),
        ("/v1/responses", "input[].arguments"),
        ("/v1/responses/input_tokens", "tools[].tools[].parameters"),
        ("/api/chat", "options.stop[]"),
        ("/v1/embeddings", "input[]"),
        ("/rerank", "documents[].text"),
    }
    assert expected - found == set()
    assert len(found) > 500


def test_a_run_sends_every_field_every_shape_and_each_kind_of_field_the_largest_bodies(
    all_fields: list[Field],
) -> None:
    attacks = field_attacks(all_fields)
    assert len({attack.name for attack in attacks}) == len(attacks)
    assert len(attacks) == sum(len(shapes(field)) for field in all_fields)

    def kinds(some: Iterable[FieldAttack]) -> set[tuple[str, str]]:
        long = [one for one in some if not one.field.is_short]
        return {(one.field.name.rpartition(".")[2], one.shape) for one in long}

    with_largest = largest(attacks)
    assert kinds(with_largest) == kinds(attacks)
    assert len(with_largest) < len(attacks) / 8
    assert {one.sizes for one in with_largest} == {(MOST_BYTES, MOST_BYTES)}
    assert len({one.name for one in with_largest}) == len(with_largest)


def test_what_a_record_has_is_not_sent_again(tmp_path: Path) -> None:
    waits = {"free": 0.25, "held": 0.5, "gap": 0.75, "health": 0.0}
    slow = Row("slow", Counter({0: 1, 200: 2}), {**waits, "gap": 1.5}, 3.25)
    quick = Row("quick", Counter({200: 3, 400: 2}), waits, 0.5)
    for row in (slow, quick):
        Record.read(tmp_path / "rows").add(row)
    found = Record.read(tmp_path / "rows")
    assert found.rows == {"slow": slow, "quick": quick}
    assert [found.has(name) for name in ("slow", "quick", "new")] == [False, True, False]
    found.add(replace(slow, worst=waits))
    assert Record.read(tmp_path / "rows").failed() == []


def test_values_have_their_sizes_and_their_places(all_fields: list[Field]) -> None:
    """But for long numbers and small sizes."""
    draw = random.Random(SEED)
    for one in draw.sample(all_fields, 100):
        name, shape = draw.choice(list(shapes(one).items()))
        for n_bytes in SIZES[:2]:
            text = body(one, shape, n_bytes)
            assert 0.5 * n_bytes < len(text) < 1.2 * n_bytes, (one.name, name)


def sent(http: httpx.Client, at: Field, text: bytes) -> httpx.Response:
    headers = {"Content-Type": "application/json"}
    if at.route in {"/api/pull", "/api/delete"}:  # which the key of `make hostile` may not do
        headers["Origin"] = "http://other.example"
    return http.request(at.method, at.route, content=text, headers=headers)


def largest_light(at: Field, shape: Shape, *, ends_wrong: bool) -> bytes:
    texts = (body(at, shape, size, ends_wrong=ends_wrong) for size in SIZES)
    return next((text for text in texts if is_light(text)), b"{}")


def test_what_is_read_on_the_event_loop_takes_few_calls(
    http: httpx.Client, all_fields: list[Field], parses: Parses
) -> None:
    draw = random.Random(SEED)
    for one in draw.sample(all_fields, 200):
        _, shape = draw.choice(list(shapes(one).items()))
        text = largest_light(one, shape, ends_wrong=draw.random() < 0.5)
        assert sent(http, one, text).status_code in TAKEN, text[:200]
    assert len(parses.heads_on_loop) > 150
    assert parses.on_loop == []
    for text in parses.heads_on_loop:
        assert n_calls(partial(parses.read_head, text)) <= MOST_CALLS, text[:200]


def test_what_is_not_quick_is_read_elsewhere(
    http: httpx.Client, all_fields: list[Field], parses: Parses
) -> None:
    draw = random.Random(SEED + 1)
    for one in draw.sample(all_fields, 50):
        _, shape = draw.choice(list(shapes(one).items()))
        assert sent(http, one, body(one, shape, LARGE_BYTES)).status_code in TAKEN
    assert len(parses.elsewhere) > 40
    assert parses.on_loop == []
    assert not [text[:200] for text in parses.heads_on_loop if not is_light(text)]
