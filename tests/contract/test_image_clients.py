"""Images sent by the clients of OpenAI, Anthropic and Ollama, which check the types of answers."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from anthropic import Anthropic
from ollama import Client
from openai import OpenAI

from engine.values.request import Request
from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.fake_engine import IMAGE, SEEING, FakeEngine
from tests.contract.image_conversations import CALL, data_url
from tests.contract.scripted import CLIENT_SECONDS

CAT = IMAGE + b"cat"
ENCODED = base64.b64encode(CAT).decode()
SHOWN = b"[\0\0\0]"
BROKEN = data_url(b"none")
OPTIONS: Any = {"api_key": "none", "max_retries": 0, "timeout": CLIENT_SECONDS}


@pytest.fixture(scope="module")
def seeing() -> FakeEngine:
    return FakeEngine(card=SEEING)


@pytest.fixture(scope="module")
def url(seeing: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with running(seeing, Settings(port=0, served_model_name=("seeing",))) as base_url:
            yield base_url


@pytest.fixture
def asked(seeing: FakeEngine) -> FakeEngine:
    seeing.reset()
    return seeing


def prompt_of(asked: FakeEngine) -> bytes:
    """The prompt of the only request, whose images are the cat's."""
    request: Request = asked.submitted.get_nowait()
    assert asked.submitted.empty()
    assert len({image.digest for image in request.images}) == 1
    return bytes(request.prompt)


@pytest.fixture
def chats(url: str) -> Iterator[Any]:
    with OpenAI(base_url=f"{url}/v1", _strict_response_validation=True, **OPTIONS) as client:
        yield client


@pytest.fixture
def messages(url: str) -> Iterator[Any]:
    with Anthropic(base_url=url, _strict_response_validation=True, **OPTIONS) as client:
        yield client


@pytest.fixture
def ollama(url: str) -> Iterator[Any]:
    with Client(url, timeout=CLIENT_SECONDS) as client:
        yield client


@pytest.mark.parametrize("detail", ["auto", "low", "high"])
def test_openai_chat(chats: Any, asked: FakeEngine, detail: str) -> None:
    shown = {"type": "image_url", "image_url": {"url": data_url(CAT), "detail": detail}}
    content = [{"type": "text", "text": "Look"}, shown]
    said = [{"role": "user", "content": content}]
    answer = chats.chat.completions.create(model="seeing", messages=said)
    assert answer.choices[0].message.content
    expected = b"[\0]" if detail == "low" else SHOWN
    prompt = prompt_of(asked)
    assert prompt == b"<user>Look" + expected + b"\n<assistant>"
    assert answer.usage.prompt_tokens == len(prompt)
    assert chats.models.retrieve("seeing").images is True


def test_openai_chat_with_a_tool_that_shows_an_image(chats: Any, asked: FakeEngine) -> None:
    shown = {"type": "image_url", "image_url": {"url": data_url(CAT)}}
    said = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": [shown]},
    ]
    chunks = chats.chat.completions.create(model="seeing", messages=said, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert prompt_of(asked).endswith(b"<user>" + SHOWN + b"\n<assistant>")


def test_openai_responses(chats: Any, asked: FakeEngine) -> None:
    """The second turn names the first and does not send the image again."""
    shown = {"type": "input_image", "image_url": data_url(CAT), "detail": "auto"}
    content = [{"type": "input_text", "text": "Look"}, shown]
    first = chats.responses.create(model="seeing", input=[{"role": "user", "content": content}])
    prompt = prompt_of(asked)
    assert prompt == b"<user>Look" + SHOWN + b"\n<assistant>"
    assert chats.responses.input_items.list(first.id).data
    with chats.responses.stream(
        model="seeing", input="And now?", previous_response_id=first.id
    ) as events:
        answer = events.get_final_response()
    assert answer.usage.input_tokens > first.usage.input_tokens
    assert prompt_of(asked).startswith(prompt)


def test_openai_errors(chats: Any) -> None:
    content = [{"type": "image_url", "image_url": {"url": BROKEN}}]
    with pytest.raises(openai.BadRequestError) as caught:
        chats.chat.completions.create(
            model="seeing", messages=[{"role": "user", "content": content}]
        )
    assert (caught.value.code, caught.value.param) == ("invalid_image", "messages[0].content[0]")


def test_anthropic(messages: Any, asked: FakeEngine) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": ENCODED}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "Look"}]
    said = [{"role": "user", "content": content}]
    counted = messages.messages.count_tokens(model="seeing", messages=said)
    with messages.messages.stream(model="seeing", max_tokens=50, messages=said) as events:
        answer = events.get_final_message()
    assert answer.content[0].text
    prompt = prompt_of(asked)
    assert prompt == b"<user>" + SHOWN + b"Look\n<assistant>"
    assert counted.input_tokens == len(prompt)


def test_anthropic_with_a_tool_that_shows_an_image(messages: Any, asked: FakeEngine) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": ENCODED}
    shown = {"type": "image", "source": source}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [shown]}
    use = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    said = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    answer = messages.messages.create(model="seeing", max_tokens=50, messages=said)
    assert answer.content[0].text
    assert prompt_of(asked).endswith(b"<user>" + SHOWN + b"\n<assistant>")


@pytest.mark.parametrize("as_path", [False, True])
def test_ollama(ollama: Any, asked: FakeEngine, tmp_path: Path, as_path: bool) -> None:
    """The library reads a file that it is given the path of."""
    file = tmp_path / "cat.gif"
    file.write_bytes(CAT)
    assert "vision" in ollama.show("seeing").capabilities
    said = [{"role": "user", "content": "Look", "images": [file if as_path else CAT]}]
    answer = ollama.chat("seeing", said)
    assert answer.message.content
    prompt = prompt_of(asked)
    assert prompt == b"<user>" + SHOWN + b"Look\n<assistant>"
    assert answer.prompt_eval_count == len(prompt)
    assert ollama.generate("seeing", "Look", images=[CAT]).response
    assert prompt_of(asked) == prompt
