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
