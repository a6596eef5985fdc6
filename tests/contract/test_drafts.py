"""How clients ask for drafts, and what they are told of them."""

import httpx
import pytest

from tests.contract.conftest import ChatBody
from tests.contract.dialects.adapters import BODIES
from tests.contract.fake_engine import CARD, FakeEngine
from tests.contract.scripted import StrictClient

MESSAGES = [{"role": "user", "content": "Hi"}]
ANSWER = "Hello, wörld!"
ANSWER_TOKENS = len(ANSWER.encode())
PREDICTION = "Hello, you there"
RIGHT = len("Hello, ")
WRONG = len("you there")


pytestmark = pytest.mark.usefixtures("engine")  # each test starts from the default script


def predicted(content: object) -> dict[str, object]:
    return {"type": "content", "content": content}


@pytest.mark.parametrize("path", sorted(BODIES.keys() - {"/api/chat"}))
def test_a_request_may_do_without_drafts(path: str, http: httpx.Client, engine: FakeEngine) -> None:
    for fields in ({}, {"speculate": None}, {"speculate": True}, {"speculate": False}):
        answer = http.post(path, json=BODIES[path] | fields)
        assert answer.status_code == 200, answer.text
    asked = [engine.submitted.get_nowait().speculate for _ in range(4)]
    assert asked == [True, True, True, False]


@pytest.mark.parametrize(
    "content",
    [PREDICTION, [{"type": "text", "text": text} for text in ("Hello, ", "you there")]],
    ids=["string", "parts"],
)
def test_a_prediction_reaches_the_engine_as_tokens(
    content: object, client: StrictClient, model: str, engine: FakeEngine
) -> None:
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, prediction=predicted(content)
    )
    assert tuple(engine.submitted.get_nowait().prediction) == tuple(PREDICTION.encode())
    assert answer.choices[0].message.content == ANSWER


def test_usage_says_which_drafts_were_right(client: StrictClient, model: str) -> None:
    asked = {"model": model, "messages": MESSAGES, "prediction": predicted(PREDICTION)}
    whole = client.chat.completions.create(**asked).usage
    *_, last = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    for usage in (whole, last.usage):
        assert usage.completion_tokens == ANSWER_TOKENS
        details = usage.completion_tokens_details
        assert details.accepted_prediction_tokens == RIGHT
        assert details.rejected_prediction_tokens == WRONG


def test_the_drafts_of_all_answers_count(client: StrictClient, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, prediction=predicted(PREDICTION), n=3
    )
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == 3 * RIGHT
    assert details.rejected_prediction_tokens == 3 * WRONG


def test_without_drafts_none_are_counted(client: StrictClient, model: str) -> None:
    chat = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        prediction=predicted(PREDICTION),
        extra_body={"speculate": False},
    )
    completion = client.completions.create(model=model, prompt="Hi")
    for answer in (chat, completion):
        details = answer.usage.completion_tokens_details
        assert details.accepted_prediction_tokens == details.rejected_prediction_tokens == 0


@pytest.mark.parametrize("content", ["", []], ids=["string", "parts"])
def test_an_empty_prediction_is_none(
    content: object, http: httpx.Client, chat: ChatBody, engine: FakeEngine
) -> None:
    body = chat(prediction=predicted(content))
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert tuple(engine.submitted.get_nowait().prediction) == ()


def test_a_prediction_may_be_as_long_as_the_context(
    http: httpx.Client, chat: ChatBody, engine: FakeEngine
) -> None:
    longest = "x" * CARD.max_context_tokens
    answer = http.post("/v1/chat/completions", json=chat(prediction=predicted(longest)))
    assert answer.status_code == 200
    answer = http.post("/v1/chat/completions", json=chat(prediction=predicted(longest + "x")))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "prediction"
    assert f"{CARD.max_context_tokens} tokens" in error["message"]
    assert f"your prediction resulted in {CARD.max_context_tokens + 1} tokens" in error["message"]


def test_what_openai_refuses_beside_a_prediction_is_taken(
    http: httpx.Client, chat: ChatBody
) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    beside = {
        "n": 2,
        "logprobs": True,
        "presence_penalty": 1,
        "frequency_penalty": 1,
        "max_completion_tokens": 4,
        "modalities": ["text"],
        "tools": [tool],
        "tool_choice": "none",
    }
    body = chat(prediction=predicted(PREDICTION), **beside)
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
