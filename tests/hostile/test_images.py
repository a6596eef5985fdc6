"""Hostile images, sent to a daemon of a model that takes images: each is refused by its place or
does no harm, nothing of them stays in memory or on the disk, and others are served meanwhile.
"""

import base64
import json
from collections.abc import Callable, Iterator
from random import Random
from urllib.parse import quote

import httpx
import pytest

from tests.hostile.image_bodies import CHAT, DIALECTS, RESPONSES, Dialect, base64_of, chat, refusal
from tests.hostile.image_target import LARGEST_BYTES, MIB, Target, attacked
from tests.hostile.pictures import (
    Hostile,
    bombs,
    changed,
    others,
    padded,
    polyglots,
    saved,
    truncated,
)

pytest.importorskip("mlx_vlm", reason="the packages for images are not installed")
pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with attacked(tmp_path_factory.mktemp("images")) as target:
        yield target


GROWN_BYTES = 48 * MIB
"""What all processes of the daemon together may grow by from one round of attacks to the next but
one."""


def attack(target: Target, sent: Hostile, dialect: Dialect, *, in_result: bool) -> None:
    body = (dialect.nested if in_result else dialect.body)(base64_of(sent.encoded))
    if dialect.path in {CHAT, RESPONSES}:
        body = json.loads(json.dumps(body).replace('url": "', 'url": "data:image/png;base64,'))
    answer = target.post(dialect.path, body)
    if not (sent.is_shown and answer.status_code == 200):
        refusal(answer, dialect.nested_place if in_result else dialect.place)


KINDS: dict[str, Callable[[Random], Iterator[Hostile]]] = {
    "bombs": lambda random: bombs(),
    "truncated": lambda random: truncated(random, 8),
    "polyglots": lambda random: polyglots(),
    "others": lambda random: others(),
    "changed": lambda random: changed(random, 8),
}


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_files(target: Target, kind: str) -> None:
    """In every dialect, by turns in messages of users and in results of tools."""
    random, n_bytes = Random(73), list[int]()
    with target.another_client():
        for _ in range(3):
            for at, sent in enumerate(KINDS[kind](random)):
                attack(target, sent, DIALECTS[at % 4], in_result=at // 4 % 2 == 1)
            n_bytes.append(target.n_bytes)
    assert n_bytes[-1] - n_bytes[0] < GROWN_BYTES
    target.check_that_nothing_is_left()


SOUND = base64_of(saved("PNG"))
"""Of 24 x 24 pixels."""


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)
def test_ways_to_write_data(target: Target, dialect: Dialect) -> None:
    """Sound data in any way are the same image; what is none is refused."""
    plain = base64.b64decode(SOUND)
    sound = [
        SOUND,
        SOUND.rstrip("="),
        SOUND.replace("+", "-").replace("/", "_"),
        "\r\n".join(SOUND[at : at + 76] for at in range(0, len(SOUND), 76)),
        f"data:image/png;base64,{SOUND}",
        f"data:image/png;charset=utf-8;base64,{SOUND}",
        f"DATA:;BASE64,{quote(SOUND, safe='')}",
        f"data:image/png,{quote(plain, safe='')}",
    ]
    counted = {counted_tokens(target.post(dialect.path, dialect.body(data))) for data in sound}
    assert len(counted) == 1
    wrong = [
        f"data:image/png;base64{SOUND}",
        "data:image/png;base64,",
        f"data:image/png,{SOUND}",
        f"data:image/png;base64,{SOUND[:40]}!{SOUND[40:]}",
        f"{SOUND}=====",
        f"{SOUND[:41]}={SOUND[41:]}",
        SOUND[:1],
        "\ud800",
        "file:///etc/passwd",
        "../../etc/passwd",
        "blob:http://localhost/1",
        "javascript:alert(1)",
    ]
    for data in wrong:
        body = json.dumps(dialect.body(data))
        answer = target.http.post(
            dialect.path, content=body, headers={"Content-Type": "application/json"}
        )
        refusal(answer, dialect.place)
    for data in ("http://127.0.0.1/a.png", "https://[::ffff:127.0.0.1]/a.png"):
        refusal(target.post(dialect.path, dialect.body(data)), dialect.place)


def counted_tokens(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    found = answer.json()
    usage = found.get("usage", found)
    for name in ("prompt_tokens", "prompt_eval_count"):
        if name in usage:
            return int(usage[name])
    return int(usage["input_tokens"]) + int(usage.get("cache_read_input_tokens", 0))


@pytest.mark.parametrize("n_images", [21, 1000, 10_000])
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)
def test_too_many_images(target: Target, dialect: Dialect, n_images: int) -> None:
    """In one message, and one in each of many."""
    body = dialect.body("AAAA")
    key = "input" if "input" in body else "messages"
    (message,) = body[key]
    (parts,) = (name for name, value in message.items() if isinstance(value, list))
    many = {**message, parts: message[parts] * n_images}
    for messages in ([many], [message] * n_images):
        answer = target.post(dialect.path, {**body, key: messages})
        assert answer.status_code == 400, answer.text
        assert "at most" in answer.text
        assert key in answer.text or "The body has too many parts" in answer.text
    target.check_that_nothing_is_left()


def test_images_that_find_no_room_next_to_each_other(target: Target) -> None:
    """And bodies that are too large for as many."""
    parts = [
        {"type": "image_url", "image_url": base64_of(padded(17 * MIB, seed))} for seed in (1, 2)
    ]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
    answer = target.post(CHAT, body)
    assert answer.status_code == 503, answer.text
    assert answer.headers["retry-after"]
    assert answer.json()["error"]["code"] == "images_busy"
    three = {"messages": [{"role": "user", "content": [*parts, *parts]}]}
    assert target.post(CHAT, three).status_code == 413
    target.check_that_nothing_is_left()


def test_an_image_of_more_than_20_mib(target: Target) -> None:
    said = refusal(
        target.post(CHAT, chat(base64_of(padded(LARGEST_BYTES + 1)))), "messages[0].content[0]"
    )
    assert "20 MiB" in said
    target.check_that_nothing_is_left()
