"""Hostile images, sent to a daemon of a model that takes images: each is refused by its place or
does no harm, nothing of them stays in memory or on the disk, and others are served meanwhile.
"""

import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any
from urllib.parse import quote

import httpx
import psutil
import pytest

from tests.contract.wire import connected, request_head
from tests.hostile.pictures import (
    Hostile,
    bombs,
    changed,
    huge_png,
    others,
    padded,
    polyglots,
    saved,
    truncated,
)
from tests.polling import WAIT_SECONDS, until
from tests.restart.living import Daemon, living
from tests.vision_checkpoints import write_vision_checkpoint

pytest.importorskip("mlx_vlm", reason="the packages for images are not installed")
pytestmark = pytest.mark.process

MIB = 1 << 20
STORE_BYTES = 20 * MIB + (256 << 10)
"""Little more than the largest image: one that is pinned leaves no room for such a one."""

LARGEST_BYTES = 20 * MIB
GROWN_BYTES = 48 * MIB
"""What all processes of the daemon together may grow by from one round of attacks to the next but
one."""

CHAT, MESSAGES, RESPONSES, OLLAMA = (
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/responses",
    "/api/chat",
)
STREAM = {
    "messages": [{"role": "user", "content": "the cat sat"}],
    "temperature": 0,
    "max_tokens": 60,
    "ignore_eos": True,
    "stream": True,
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a dialect writes an image in a user's message and in a tool's result, and the place that
    its errors name.
    """

    path: str
    body: Callable[[str], dict[str, Any]]
    place: str
    nested: Callable[[str], dict[str, Any]]
    nested_place: str


CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def _chat(data: str, *before: dict[str, Any], role: str = "user") -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": data}}
    said = {"role": role, "content": [part]} | ({"tool_call_id": "call_1"} if before else {})
    return {"messages": [*before, said], "max_tokens": 1}


def _chat_result(data: str) -> dict[str, Any]:
    user = {"role": "user", "content": "Look"}
    return _chat(data, user, {"role": "assistant", "tool_calls": [CALL]}, role="tool")


def _block(data: str) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return {"type": "image", "source": source}


def _messages(data: str) -> dict[str, Any]:
    return {"max_tokens": 1, "messages": [{"role": "user", "content": [_block(data)]}]}


def _messages_result(data: str) -> dict[str, Any]:
    call = {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [_block(data)]}
    turns = ("user", "Look"), ("assistant", [call]), ("user", [result])
    messages = [{"role": role, "content": content} for role, content in turns]
    return {"max_tokens": 1, "messages": messages}


def _input_image(data: str) -> dict[str, Any]:
    return {"type": "input_image", "image_url": data}


def _responses(data: str) -> dict[str, Any]:
    said = {"role": "user", "content": [_input_image(data)]}
    return {"input": [said], "max_output_tokens": 1, "store": False}


def _responses_result(data: str) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "call_1", "output": [_input_image(data)]}
    said = [{"role": "user", "content": "Look"}, call, output]
    return {"input": said, "max_output_tokens": 1, "store": False}


def _ollama(data: str) -> dict[str, Any]:
    said = {"role": "user", "content": "", "images": [data]}
    return {"messages": [said], "stream": False, "options": {"num_predict": 1}}


def _ollama_result(data: str) -> dict[str, Any]:
    call = {"function": {"name": "look", "arguments": {}}}
    messages = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "", "images": [data]},
    ]
    return {"messages": messages, "stream": False, "options": {"num_predict": 1}}


DIALECTS = (
    Dialect(CHAT, _chat, "messages[0].content[0]", _chat_result, "messages[2].content[0]"),
    Dialect(
        MESSAGES,
        _messages,
        "messages[0].content[0].image",
        _messages_result,
        "messages[2].content[0].tool_result.content[0].image",
    ),
    Dialect(
        RESPONSES, _responses, "input[0].content[0]", _responses_result, "input[2].output[0]"
    ),
    Dialect(OLLAMA, _ollama, "messages[0].images[0]", _ollama_result, "messages[2].images[0]"),
)


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


@dataclass
class Target:
    """A daemon under attack, its folder of images, and another client's stream."""

    daemon: Daemon
    folder: Path
    http: httpx.Client
    n_streams: int = 0
    alone: str = ""

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.http.post(path, json=body)

    @property
    def n_bytes(self) -> int:
        """The memory of all of its processes."""
        total = 0
        process = psutil.Process(self.daemon.process.pid)
        for one in (process, *process.children(recursive=True)):
            try:
                total += one.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total

    def files(self) -> dict[str, int]:
        """The files of images, by their sizes."""
        return {
            file.name: file.stat().st_size
            for file in self.folder.glob("*/*")
            if file.name != "lock"
        }

    def stream(self) -> str:
        """The text of a stream, with its reasoning."""
        text = ""
        with self.http.stream("POST", CHAT, json=STREAM) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        delta = choice["delta"]
                        text += (delta.get("reasoning_content") or "") + (delta.get("content") or "")
        return text

    @contextmanager
    def another_client(self) -> Iterator[None]:
        """Streams one answer after another while the block lasts. Each is what it is alone."""
        over = threading.Event()
        said = list[str | BaseException]()

        def ask() -> None:
            while not over.is_set():
                try:
                    said.append(self.stream())
                except BaseException as error:
                    said.append(error)
                    return

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield
        finally:
            n_begun = len(said)
            until(lambda: len(said) > n_begun or not thread.is_alive())
            over.set()
            thread.join()
        assert set(said) == {self.alone}

    def check_that_nothing_is_left(self) -> None:
        """Files are within the limit and none is unfinished; none is pinned: an image that leaves
        no room for another is taken.
        """
        names = until(self.files, lambda files: not any(map(is_unfinished, files)))
        assert sum(names.values()) <= STORE_BYTES
        seed = int(monotonic() * 1000)
        whole = self.post(CHAT, _chat(base64_of(padded(LARGEST_BYTES, seed))))
        assert whole.status_code == 200, whole.text
        until(self.files, lambda files: not any(map(is_unfinished, files)))
        assert sum(self.files().values()) <= STORE_BYTES


def is_unfinished(name: str) -> bool:
    return name.startswith(("new-", ".")) or name.endswith(".part")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("images")
    checkpoint = write_vision_checkpoint("kimi_vl", folder)
    flags = ("--kv-cache-bytes", str(8 * MIB), "--image-store-bytes", str(STORE_BYTES))
    cache = folder / "cache"
    with (
        living(checkpoint, folder / "log", *flags, XDG_CACHE_HOME=str(cache)) as daemon,
        httpx.Client(base_url=daemon.url, timeout=WAIT_SECONDS, trust_env=False) as http,
    ):
        target = Target(daemon, cache / "rootstock" / "images", http)
        target.alone = target.stream()
        yield target


def refusal(answer: httpx.Response, place: str) -> str:
    """The words of a 400 that names the place of an image."""
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    said = str(error if isinstance(error, str) else error["message"])
    assert said.startswith(f"{place}: "), said
    return said


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
    return int(usage["input_tokens"]) + usage.get("cache_read_input_tokens", 0)


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
        assert key in answer.text
    target.check_that_nothing_is_left()


def test_images_that_find_no_room_next_to_each_other(target: Target) -> None:
    """And bodies that are too large for as many."""
    parts = [{"type": "image_url", "image_url": base64_of(padded(17 * MIB, seed))} for seed in (1, 2)]
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
        target.post(CHAT, _chat(base64_of(padded(LARGEST_BYTES + 1)))), "messages[0].content[0]"
    )
    assert "20 MiB" in said
    target.check_that_nothing_is_left()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.999])
def test_clients_that_leave_while_their_body_arrives(target: Target, share: float) -> None:
    content = json.dumps(_chat(base64_of(padded(4 * MIB, 7)))).encode()
    for _ in range(4):
        with connected(target.daemon.url) as connection:
            connection.sendall(request_head(content[: int(len(content) * share)], len(content)))
    target.check_that_nothing_is_left()


def test_clients_that_leave_while_their_images_are_prepared(target: Target) -> None:
    """And those that wait for the one process that decodes."""
    with target.another_client():
        for stream in (False, True):
            for seed in range(6):
                slow = saved("PNG", (1500, 1500), seed)
                body = {**_chat(base64_of(slow)), "stream": stream}
                with connected(target.daemon.url) as connection:
                    connection.sendall(request_head(json.dumps(body).encode()))
    target.check_that_nothing_is_left()


def test_clients_that_leave_an_answer_about_an_image(target: Target) -> None:
    body = {**_chat(base64_of(padded(MIB, 5))), "max_tokens": 200, "ignore_eos": True}
    for _ in range(3):
        with target.http.stream("POST", CHAT, json={**body, "stream": True}) as answer:
            next(answer.iter_raw())
    target.check_that_nothing_is_left()


def test_the_process_that_decodes_comes_back(target: Target) -> None:
    """Killed from outside between two images, and while it decodes one."""
    assert target.post(CHAT, _chat(SOUND)).status_code == 200
    (first,) = decoders(target)
    first.kill()
    refusal(target.post(CHAT, _chat(base64_of(huge_png()))), "messages[0].content[0]")
    (second,) = decoders(target)
    assert second.pid != first.pid
    answers = list[httpx.Response]()
    large = base64_of(saved("PNG", (2500, 2500), 99))
    thread = threading.Thread(target=lambda: answers.append(target.post(CHAT, _chat(large))))
    thread.start()
    used = second.cpu_times().user
    until(lambda: not second.is_running() or second.cpu_times().user > used or not thread.is_alive())
    second.kill()
    thread.join()
    assert answers[0].status_code == 200, answers[0].text
    target.check_that_nothing_is_left()


def decoders(target: Target) -> list[psutil.Process]:
    """The processes that decode images."""
    children = psutil.Process(target.daemon.process.pid).children(recursive=True)
    return [one for one in children if one.is_running() and is_decoder(one)]


def is_decoder(process: psutil.Process) -> bool:
    try:
        return "engine.images.worker" in process.cmdline()
    except psutil.Error:  # it has ended meanwhile
        return False
