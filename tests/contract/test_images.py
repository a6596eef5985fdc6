"""Images in requests of every dialect, over a socket."""

import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from logging import LogRecord
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import pytest
from blake3 import blake3

from engine.api import ImagesBusy
from engine.values.images import PreparedImage
from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.fake_engine import IMAGE, PLACEHOLDER, SEEING, FakeEngine, Gate
from tests.contract.image_conversations import CALL, data_url

CAT = IMAGE + b"cat"


@pytest.fixture(scope="module")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def seeing(cache_home: None) -> FakeEngine:
    return FakeEngine(card=SEEING)


@pytest.fixture(scope="module")
def url(seeing: FakeEngine) -> Iterator[str]:
    with running(seeing, Settings(port=0)) as base_url:
        yield base_url


@pytest.fixture
def http(url: str, seeing: FakeEngine) -> Iterator[httpx.Client]:
    seeing.reset()
    with httpx.Client(base_url=url, timeout=20) as client:
        yield client


def test_an_image_of_a_chat(http: httpx.Client, seeing: FakeEngine) -> None:
    content = [
        {"type": "text", "text": "What is"},
        {"type": "image_url", "image_url": {"url": data_url(CAT)}},
        {"type": "text", "text": "this?"},
    ]
    body = {"messages": [{"role": "user", "content": content}]}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    request = seeing.submitted.get_nowait()
    prompt = bytes(request.prompt)
    assert prompt == b"<user>What is[\0\0\0]this?\n<assistant>"
    (image,) = request.images
    assert image.runs == ((prompt.index(b"\0"), 3),)
    assert answer.json()["usage"]["prompt_tokens"] == len(prompt)


def test_a_long_image(http: httpx.Client, seeing: FakeEngine) -> None:
    data = IMAGE + bytes(range(256)) * 4096
    content = [
        {"type": "image_url", "image_url": {"url": data_url(data), "detail": "low"}},
    ]
    body = {"messages": [{"role": "user", "content": content}], "stream": True}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert seeing.prepared.get_nowait() == data
    assert list(seeing.submitted.get_nowait().prompt).count(PLACEHOLDER) == 1


def prompts_of(seeing: FakeEngine) -> bytes:
    return bytes(seeing.submitted.get_nowait().prompt)


ENCODED = base64.b64encode(CAT).decode()
SHOWN = b"[\0\0\0]"
CHAT = {
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": data_url(CAT)}},
                {"type": "text", "text": "Look"},
            ],
        },
        {"role": "assistant", "tool_calls": [CALL]},
        {
            "role": "tool",
            "tool_call_id": "call_1",
            "content": [{"type": "image_url", "image_url": data_url(CAT)}],
        },
    ]
}
MESSAGES = {
    "max_tokens": 10,
    "messages": [
        {
            "role": "user",
            "content": [
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": ENCODED},
                },
                {"type": "text", "text": "Look"},
            ],
        },
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "call_1", "name": "look", "input": {}}],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "call_1",
                    "content": [{"type": "image", "source": {"type": "url", "url": data_url(CAT)}}],
                }
            ],
        },
    ],
}
RESPONSES = {
    "input": [
        {
            "role": "user",
            "content": [
                {"type": "input_image", "image_url": data_url(CAT)},
                {"type": "input_text", "text": "Look"},
            ],
        },
        {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "call_1",
            "output": [{"type": "input_image", "image_url": data_url(CAT)}],
        },
    ]
}
OLLAMA = {
    "stream": False,
    "messages": [
        {"role": "user", "content": "Look", "images": [ENCODED]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]},
        {"role": "tool", "content": "", "images": [ENCODED]},
    ],
}
DIALECTS = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
    "/api/chat": OLLAMA,
}


@pytest.mark.parametrize("path", DIALECTS)
def test_images_of_users_and_of_tools(http: httpx.Client, seeing: FakeEngine, path: str) -> None:
    """The template of the fake renders no images in tool results."""
    answer = http.post(path, json=DIALECTS[path])
    assert answer.status_code == 200, answer.text
    prompt = prompts_of(seeing)
    assert prompt.startswith(b"<user>" + SHOWN + b"Look\n<assistant>")
    assert prompt.endswith(b"<tool>\n<user>" + SHOWN + b"\n<assistant>")
    assert seeing.prepared.qsize() <= 1


def test_an_image_of_a_generate_request(http: httpx.Client, seeing: FakeEngine) -> None:
    body = {"prompt": "Look", "images": [ENCODED], "stream": False}
    assert http.post("/api/generate", json=body).status_code == 200
    assert prompts_of(seeing) == b"<user>" + SHOWN + b"Look\n<assistant>"


def test_a_stored_response(http: httpx.Client, seeing: FakeEngine) -> None:
    first = http.post("/v1/responses", json=RESPONSES).json()
    prompt = prompts_of(seeing)
    items = http.get(f"/v1/responses/{first['id']}/input_items").text
    assert "base64" not in items
    body = {"previous_response_id": first["id"], "input": "And now?"}
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert prompts_of(seeing).startswith(prompt)


def test_counting(http: httpx.Client, seeing: FakeEngine) -> None:
    body = {"messages": MESSAGES["messages"]}
    counted = http.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
    tokenized = http.post("/tokenize", json=CHAT).json()
    rendered = http.post("/v1/chat/completions/render", json=CHAT).json()
    counted_input = http.post("/v1/responses/input_tokens", json=RESPONSES).json()["input_tokens"]
    usage = http.post("/v1/chat/completions", json=CHAT).json()["usage"]
    prompt = prompts_of(seeing)
    assert bytes(tokenized["tokens"]) == bytes(rendered["token_ids"]) == prompt
    assert counted == counted_input == usage["prompt_tokens"] == len(prompt)


@dataclass(frozen=True)
class Dialect:
    """How a dialect writes a message of one image and where its errors have the image."""

    path: str
    place: str
    body: Callable[[str], dict[str, Any]]


def chat_body(data: str) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": f"data:;base64,{data}"}}
    return {"messages": [{"role": "user", "content": [part]}]}


def messages_body(data: str) -> dict[str, Any]:
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/gif", "data": data}}
    return {"max_tokens": 1, "messages": [{"role": "user", "content": [block]}]}


def responses_body(data: str) -> dict[str, Any]:
    part = {"type": "input_image", "image_url": f"data:;base64,{data}"}
    return {"input": [{"role": "user", "content": [part]}]}


def ollama_body(data: str) -> dict[str, Any]:
    return {"stream": False, "messages": [{"role": "user", "content": "", "images": [data]}]}


EACH = (
    Dialect("/v1/chat/completions", "messages[0].content[0]", chat_body),
    Dialect("/v1/messages", "messages[0].content[0].image", messages_body),
    Dialect("/v1/responses", "input[0].content[0]", responses_body),
    Dialect("/api/chat", "messages[0].images[0]", ollama_body),
)
each_dialect = pytest.mark.parametrize("dialect", EACH, ids=lambda dialect: dialect.path)


def refusal(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


@each_dialect
@pytest.mark.parametrize("data", [b"no image", b"", b"x" * 100_000], ids=("short", "empty", "long"))
def test_what_is_no_image(http: httpx.Client, dialect: Dialect, data: bytes) -> None:
    said = refusal(http.post(dialect.path, json=dialect.body(base64.b64encode(data).decode())))
    assert said.startswith(f"{dialect.place}: ")


@each_dialect
def test_what_is_no_base64(http: httpx.Client, dialect: Dialect) -> None:
    said = refusal(http.post(dialect.path, json=dialect.body("?" * 10)))
    assert said == f"{dialect.place}: the image is neither a data: URL nor base64"


@each_dialect
def test_a_model_without_images(dialect: Dialect) -> None:
    card = replace(SEEING, images=None, images_refused="its tower is another's")
    with (
        running(FakeEngine(card=card), Settings(port=0)) as url,
        httpx.Client(base_url=url) as http,
    ):
        said = refusal(http.post(dialect.path, json=dialect.body(ENCODED)))
        assert said == f"{dialect.place}: this model takes no images: its tower is another's"
        assert http.get("/v1/models").json()["data"][0]["images"] is False


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video_url", "video_url": {"url": "data:"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_data": data_url(b"%PDF")}},
        {"type": "image_url"},
        {"type": "image_url", "image_url": {"url": 5}},
        {"type": "image_url", "image_url": {"url": data_url(CAT), "detail": "much"}},
    ],
)
def test_parts_that_are_not_served(http: httpx.Client, part: dict[str, Any]) -> None:
    content = [{"type": "text", "text": "x"}, part]
    body = {"messages": [{"role": "user", "content": content}]}
    said = refusal(http.post("/v1/chat/completions", json=body))
    assert said.startswith("messages[0].content[1]")


def test_no_more_than_twenty_images(http: httpx.Client) -> None:
    part = {"type": "image_url", "image_url": data_url(CAT)}
    twenty = [{"role": "user", "content": [part] * 20}]
    assert http.post("/v1/chat/completions", json={"messages": twenty}).status_code == 200
    for n_messages in (2, 500):
        body = {"messages": twenty * n_messages}
        assert "at most 20 images" in refusal(http.post("/v1/chat/completions", json=body))


def test_an_image_is_prepared_once(http: httpx.Client, seeing: FakeEngine) -> None:
    data = base64.b64encode(IMAGE + b"once").decode()
    for dialect in EACH:
        assert http.post(dialect.path, json=dialect.body(data)).status_code == 200
    assert seeing.prepared.qsize() == 1


def test_bodies_with_images_may_be_large(http: httpx.Client, seeing: FakeEngine) -> None:
    """10 MB of image, and as many of text."""
    data = base64.b64encode(IMAGE + bytes(10_000_000)).decode()
    part = {"type": "image_url", "image_url": {"url": data, "detail": "low"}}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": [part]}]}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert len(seeing.prepared.get_nowait()) == len(IMAGE) + 10_000_000
    text = http.post("/v1/chat/completions", json={"user": data, **body})
    assert text.status_code == 413
    assert "8388608" in text.json()["error"]["message"]


def test_text_that_looks_like_an_image(http: httpx.Client, seeing: FakeEngine) -> None:
    """It is text where the client has it as text."""
    text = base64.b64encode(bytes(100_000)).decode()
    body = {"messages": [{"role": "user", "content": text}]}
    said = refusal(http.post("/v1/chat/completions", json=body))
    n_tokens = len("<user>") + len(text) + len("\n<assistant>")
    assert f"resulted in {n_tokens} tokens" in said


def test_a_prompt_that_is_too_long_names_its_images(http: httpx.Client) -> None:
    data = base64.b64encode(IMAGE + bytes(600)).decode()
    said = refusal(http.post("/v1/chat/completions", json=chat_body(data)))
    assert "600 of them of images" in said


def test_placeholders_of_clients_are_tokens(http: httpx.Client, seeing: FakeEngine) -> None:
    body = {"prompt": [65, PLACEHOLDER, PLACEHOLDER], "max_tokens": 1}
    assert http.post("/v1/completions", json=body).status_code == 200
    request = seeing.submitted.get_nowait()
    assert list(request.prompt) == [65, PLACEHOLDER, PLACEHOLDER]
    assert not request.images


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_every_role_keeps_its_images(http: httpx.Client, seeing: FakeEngine, role: str) -> None:
    part = {"type": "image_url", "image_url": data_url(CAT)}
    said = {"role": role, "content": [part], "tool_call_id": "call_1"}
    body = {"messages": [*CHAT["messages"][:2], said] if role == "tool" else [said]}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    n_images = 2 if role == "tool" else 1
    assert len(seeing.submitted.get_nowait().images) == n_images


def test_a_stored_image_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = Settings(port=0, image_store_bytes=1000)
    with running(FakeEngine(card=SEEING), settings) as url, httpx.Client(base_url=url) as http:
        first = http.post("/v1/responses", json=responses_body(ENCODED)).json()
        continued = {"previous_response_id": first["id"], "input": "And now?"}
        assert http.post("/v1/responses", json=continued).status_code == 200
        other = responses_body(base64.b64encode(IMAGE + bytes(490)).decode())
        other["input"][0]["content"][0]["detail"] = "low"
        assert http.post("/v1/responses", json=other).status_code == 200
        said = refusal(http.post("/v1/responses", json=continued))
        assert said.startswith("previous_response_id: the image of this stored item is no longer")
        too_large = base64.b64encode(IMAGE + bytes(800)).decode()
        assert http.post("/v1/responses", json=responses_body(too_large)).status_code == 503
    assert not [*(tmp_path / "rootstock" / "images").iterdir()]


def test_digests_are_no_secret_door(http: httpx.Client) -> None:
    """Only this server's own stored items name an image by its digest."""
    assert http.post("/v1/responses", json=responses_body(ENCODED)).status_code == 200
    part = {"type": "input_image", "image_digest": blake3(CAT).hexdigest()}
    body = {"input": [{"role": "user", "content": [part]}]}
    assert refusal(http.post("/v1/responses", json=body)).startswith("input[0].content[0]")


def test_a_full_queue_of_images(http: httpx.Client, seeing: FakeEngine) -> None:
    async def busy(*given: object) -> PreparedImage:
        raise ImagesBusy("100 images wait", 7)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seeing, "prepare_image", busy)
        data = base64.b64encode(IMAGE + b"busy").decode()
        answer = http.post("/v1/chat/completions", json=chat_body(data))
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "7"


def test_a_stream_is_kept_alive_while_its_images_are_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, departures: "Queue[LogRecord]"
) -> None:
    """Other requests are answered meanwhile, and a client may leave."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gate = Gate()
    engine = FakeEngine(card=SEEING, preparing=gate)
    settings = Settings(port=0, keepalive_seconds=0.05)
    body = {**chat_body(ENCODED), "stream": True}
    with running(engine, settings) as url, httpx.Client(base_url=url, timeout=20) as http:
        with http.stream("POST", "/v1/chat/completions", json=body) as stream:
            chunks = stream.iter_raw()
            assert next(chunks).startswith(b":")
            other = httpx.post(f"{url}/v1/chat/completions", json={"messages": MESSAGES_OF_TEXT})
            assert other.status_code == 200
            gate.open()
            assert b"[DONE]" in b"".join(chunks)
        engine.preparing = Gate()
        left = {**chat_body(base64.b64encode(IMAGE + b"left").decode()), "stream": False}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/chat/completions", json=left, timeout=0.3)
        assert departures.get(timeout=20)
        assert engine.submitted.qsize() == 2


MESSAGES_OF_TEXT = [{"role": "user", "content": "Hi"}]
