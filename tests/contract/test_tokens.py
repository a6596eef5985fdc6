"""Text to tokens and back."""

from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from server.settings import Settings
from tests.contract.conftest import ChatBody
from tests.contract.daemon import running
from tests.contract.fake_engine import CARD, END_OF_TEXT, ByteTokenizer, FakeEngine

pytestmark = pytest.mark.usefixtures("engine")  # each test starts from the default script


@dataclass(frozen=True)
class MarkingTokenizer(ByteTokenizer):
    """Puts a token before each text, unless told not to."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [END_OF_TEXT] * add_special_tokens + super().encode(text, add_special_tokens=False)


def post(http: httpx.Client, path: str, **fields: object) -> Any:
    answer = http.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_prompt_and_back(http: httpx.Client, model: str) -> None:
    tokenized = post(http, "/tokenize", model=model, prompt="Grüße<|end|>")
    assert tokenized == {
        "count": len("Grüße<|end|>".encode()),
        "max_model_len": CARD.max_context_tokens,
        "tokens": list("Grüße<|end|>".encode()),
        "token_strs": None,
    }
    back = post(http, "/detokenize", model=model, tokens=tokenized["tokens"])
    assert back == {"prompt": "Grüße<|end|>"}


def test_nothing_and_back(http: httpx.Client) -> None:
    assert post(http, "/tokenize", prompt="")["tokens"] == []
    assert post(http, "/detokenize", tokens=[]) == {"prompt": ""}


def test_special_tokens_are_text_too(http: httpx.Client) -> None:
    assert post(http, "/detokenize", tokens=[72, END_OF_TEXT]) == {"prompt": "H<|end|>"}


def test_the_text_of_each_token(http: httpx.Client) -> None:
    answer = post(http, "/tokenize", prompt="aö", return_token_strs=True)
    assert answer["token_strs"] == ["a", r"bytes:\xc3", r"bytes:\xb6"]


@pytest.mark.parametrize(("fields", "marked"), [({}, 1), ({"add_special_tokens": False}, 0)])
def test_special_tokens_are_added_unless_told_not_to(
    fields: dict[str, object], marked: int
) -> None:
    with running(FakeEngine(tokenizer=MarkingTokenizer()), Settings(port=0)) as url:
        answer = httpx.post(f"{url}/tokenize", json={"prompt": "a", **fields}).json()
    assert answer["tokens"] == [END_OF_TEXT] * marked + [97]


def test_a_chat_is_what_the_engine_is_sent(
    http: httpx.Client, chat: ChatBody, engine: FakeEngine
) -> None:
    body = chat(add_special_tokens=False)
    tokenized = post(http, "/tokenize", **body)
    assert engine.submitted.empty()
    http.post("/v1/chat/completions", json=body)
    assert tokenized["tokens"] == list(engine.submitted.get_nowait().prompt)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions/render"])
def test_the_assistants_turn_is_left_out_on_request(
    http: httpx.Client, chat: ChatBody, engine: FakeEngine, path: str
) -> None:
    answer = post(http, path, **chat(add_generation_prompt=False))
    assert bytes(answer.get("tokens") or answer["token_ids"]) == b"<user>Hi\n"


UNSUPPORTED = [
    {"add_special_tokens": True},
    {"chat_template": "{{ messages }}"},
]


@pytest.mark.parametrize("fields", UNSUPPORTED, ids=str)
def test_what_would_make_another_prompt_is_refused(
    http: httpx.Client, chat: ChatBody, fields: dict[str, object]
) -> None:
    answer = http.post("/tokenize", json=chat(**fields))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported")


BAD = [
    ("/tokenize", {}, 400, None),
    ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, 400, None),
    ("/tokenize", {"prompt": ["a", "b"]}, 400, "prompt"),
    ("/tokenize", {"prompt": [257]}, 400, "prompt"),
    ("/tokenize", {"prompt": "x" * (CARD.max_context_tokens + 1)}, 400, "prompt"),
    ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
    ("/detokenize", {}, 400, "tokens"),
    ("/detokenize", {"tokens": "a"}, 400, "tokens"),
    ("/detokenize", {"tokens": [1, "a"]}, 400, "tokens"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
    ("/detokenize", {"tokens": [257]}, 400, "tokens"),
    ("/detokenize", {"tokens": [10**4000]}, 400, "tokens"),
    ("/detokenize", {"tokens": [97] * (CARD.max_context_tokens + 1)}, 400, "tokens"),
    ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD, ids=range(len(BAD)))
def test_what_is_refused(
    http: httpx.Client, path: str, body: dict[str, object], status: int, param: str | None
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


def test_as_many_tokens_as_a_sequence_may_have(http: httpx.Client) -> None:
    text = "x" * CARD.max_context_tokens
    tokens = post(http, "/tokenize", prompt=text)["tokens"]
    assert post(http, "/detokenize", tokens=tokens) == {"prompt": text}


def test_what_a_client_needs_that_renders_chats_itself(http: httpx.Client, model: str) -> None:
    """lm-eval asks so, for `tokenizer_backend=remote`. The embedded model's files say it."""
    for query in ({}, {"model": model}):
        answer = http.get("/tokenizer_info", params=query)
        assert answer.status_code == 200
        info = answer.json()
        template = info.pop("chat_template")
        assert "<|im_start|>" in template
        assert info == {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
        }


def test_the_tokenizer_of_no_model_is_not_found(http: httpx.Client) -> None:
    assert http.get("/tokenizer_info", params={"model": "nope"}).status_code == 404


def test_the_document_has_the_400_for_a_name_that_is_too_long(http: httpx.Client) -> None:
    answer = http.get("/tokenizer_info", params={"model": "x" * 257})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    operation = http.get("/openapi.json").json()["paths"]["/tokenizer_info"]["get"]
    assert "400" in operation["responses"]
