"""Generated conversations with images: all dialects show the same, and all counts of their tokens
agree.
"""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from blake3 import blake3
from hypothesis import given, settings

from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.fake_engine import IMAGE, PLACEHOLDER, SEEING, FakeEngine
from tests.contract.image_conversations import CONVERSATIONS, Conversation
from tests.profiles import examples

SEEN = FakeEngine(card=SEEING)


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with running(SEEN, Settings(port=0)) as url, httpx.Client(base_url=url) as client:
            yield client


@given(said=CONVERSATIONS)
@settings(max_examples=examples(50))
def test_generated_conversations(http: httpx.Client, said: Conversation) -> None:
    """All images of all dialects are shown, in their order, and all texts."""
    for path, body in (
        ("/v1/chat/completions", said.chat()),
        ("/v1/messages", said.messages()),
        ("/v1/responses", said.responses()),
        ("/api/chat", said.ollama()),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        request = SEEN.submitted.get_nowait()
        digests = [blake3(data + b"full").digest() for data in said.images]
        assert [image.digest for image in request.images] == digests
        for image, data in zip(request.images, said.images, strict=True):
            ((start, n_tokens),) = image.runs
            assert n_tokens == len(data) - len(IMAGE)
            assert set(request.prompt[start : start + n_tokens]) == {PLACEHOLDER}
            assert request.prompt[start - 1] == ord("[")
        assert list(request.prompt).count(PLACEHOLDER) == sum(
            len(data) - len(IMAGE) for data in said.images
        )
        if path != "/api/chat":
            prompt = bytes(request.prompt)
            assert all(text.encode() in prompt for text in said.texts)


@given(said=CONVERSATIONS)
@settings(max_examples=examples(50))
def test_all_counts_of_tokens_agree(http: httpx.Client, said: Conversation) -> None:
    """What is counted before a request is what its prompt has and what its usage says."""

    def post(path: str, body: object) -> Any:
        answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    chat = post("/v1/chat/completions", said.chat())["usage"]["prompt_tokens"]
    prompt = SEEN.submitted.get_nowait().prompt
    tokenized = post("/tokenize", said.chat())
    assert tokenized["tokens"] == list(prompt)
    assert post("/v1/chat/completions/render", said.chat())["token_ids"] == list(prompt)
    assert chat == tokenized["count"] == len(prompt)

    usage = post("/v1/messages", said.messages())["usage"]
    prompt = SEEN.submitted.get_nowait().prompt
    cached = usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    counted = post("/v1/messages/count_tokens", {"messages": said.messages()["messages"]})
    assert usage["input_tokens"] + cached == counted["input_tokens"] == len(prompt)

    usage = post("/v1/responses", said.responses())["usage"]
    prompt = SEEN.submitted.get_nowait().prompt
    counted = post("/v1/responses/input_tokens", {"input": said.responses()["input"]})
    assert usage["input_tokens"] == counted["input_tokens"] == len(prompt)

    answer = post("/api/chat", said.ollama())
    assert answer["prompt_eval_count"] == len(SEEN.submitted.get_nowait().prompt)
