"""`allowed_token_ids` and `bad_words` with the embedded model: what they rule out is not said."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.process

PATHS = ["/v1/chat/completions", "/v1/completions"]
CHAT = {"messages": [{"role": "user", "content": "Name three colours."}]}


@pytest.fixture(scope="module")
def http(demo_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=demo_url, timeout=60) as made:
        yield made


def texts(http: httpx.Client, path: str, **fields: Any) -> list[str]:
    """The text of each choice, greedy and at most 24 tokens. Both paths have the same prompt."""
    prompt = {"prompt": http.post("/tokenize", json=CHAT).json()["tokens"]}
    body = CHAT if path == PATHS[0] else prompt
    answer = http.post(path, json={**body, "temperature": 0, "max_tokens": 24, **fields})
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    return [
        choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices
    ]


@pytest.mark.parametrize("path", PATHS)
def test_no_choice_has_a_bad_word(http: httpx.Client, path: str) -> None:
    (usual,) = texts(http, path)
    first, second, third = usual.split()[:3]
    words = [first, f"{second} {third}"]
    found = texts(http, path, bad_words=words, n=2)
    assert found == [found[0]] * 2
    assert found[0].strip()
    assert f"{second} {third}" not in found[0]
    assert not found[0].strip().startswith(first)
    assert texts(http, path, bad_words=words) == found[:1]  # as it is the second time, with drafts


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_has_allowed_tokens_alone(http: httpx.Client, path: str) -> None:
    tokens = http.post("/tokenize", json={"prompt": "red", "add_special_tokens": False}).json()
    allowed = tokens["tokens"]
    (text,) = texts(http, path, allowed_token_ids=allowed)
    pieces = [http.post("/detokenize", json={"tokens": [one]}).json()["prompt"] for one in allowed]
    for piece in sorted(pieces, key=len, reverse=True):
        text = text.replace(piece, "")
    assert not text.strip()
