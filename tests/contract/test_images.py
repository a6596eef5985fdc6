"""Images in requests of every dialect, over a socket."""

import base64
from collections.abc import Iterator

import httpx
import pytest

from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.fake_engine import IMAGE, PLACEHOLDER, SEEING, FakeEngine

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


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


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
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
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
