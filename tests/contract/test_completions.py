"""Text completions as clients and lm-eval see them."""

import json
from typing import Any

import httpx
import pytest

from engine.values.request import TEXT_BEFORE_TOKENS
from server.dialects.completions import CompletionRequest
from tests.contract.fake_engine import FakeEngine, Script
from tests.contract.scripted import StrictClient

ANSWER = "Hello, wörld!"


pytestmark = pytest.mark.usefixtures("engine")  # each test starts from the default script


def post(http: httpx.Client, model: str, **fields: object) -> Any:
    answer = http.post("/v1/completions", json={"model": model, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_answer_has_every_key_of_the_api(http: httpx.Client, model: str) -> None:
    body = post(http, model, prompt="Hi")
    assert set(body) == {
        *("id", "object", "created", "model", "system_fingerprint", "choices", "usage")
    }
    assert body["object"] == "text_completion"
    choice = {"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop"}
    assert body["choices"] == [choice]


def test_default_is_sixteen_tokens(client: StrictClient, model: str, engine: FakeEngine) -> None:
    engine.script = Script(answers=("x" * 50,))
    answer = client.completions.create(model=model, prompt="Hi")
    assert answer.choices[0].text == "x" * 16
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "seen"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
        (["ab", [99]], ["ab", "c"]),
    ],
)
def test_every_shape_of_prompt(
    http: httpx.Client, model: str, engine: FakeEngine, prompt: object, seen: list[str]
) -> None:
    body = post(http, model, prompt=prompt, max_tokens=3)
    requests = [engine.submitted.get_nowait() for _ in seen]
    assert [bytes(request.prompt).decode() for request in requests] == seen
    assert [request.text_before for request in requests] == [
        tuple(r.prompt[-TEXT_BEFORE_TOKENS:]) for r in requests
    ]
    assert [choice["index"] for choice in body["choices"]] == list(range(len(seen)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, seen))
    assert body["usage"]["completion_tokens"] == 3 * len(seen)


def test_choices_of_prompts_times_n_are_in_index_order(
    client: StrictClient, model: str, engine: FakeEngine
) -> None:
    engine.script = Script(answers=("a", "b"))
    answer = client.completions.create(model=model, prompt=["x", "y"], n=2)
    assert [choice.text for choice in answer.choices] == ["a", "b", "a", "b"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_cached_tokens_count_each_prompt_once(http: httpx.Client, model: str) -> None:
    post(http, model, prompt=["count me", "me too"])
    usage = post(http, model, prompt=["count me", "me too"], n=3)["usage"]
    assert usage["prompt_tokens"] == len("count me") + len("me too")
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 2


def test_fields_may_be_null_or_unknown(http: httpx.Client, model: str) -> None:
    nulls = dict.fromkeys(CompletionRequest.model_fields.keys() - {"model"})
    fields = {**nulls, "prompt": "x", "user": "me", "prompt_cache_key": "k", "x": [1, {}]}
    assert post(http, model, **fields)["choices"][0]["text"] == ANSWER


def test_values_at_their_limits(http: httpx.Client, model: str) -> None:
    body = post(http, model, prompt="x", best_of=20, n=20, logprobs=5)
    assert len(body["choices"]) == 20
    assert all(len(top) >= 5 for top in body["choices"][0]["logprobs"]["top_logprobs"])


def test_nothing_at_all_may_be_generated(http: httpx.Client, model: str) -> None:
    body = post(http, model, prompt="x", max_tokens=0)
    choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}
    assert body["choices"] == [choice]


def test_best_of_returns_the_most_likely(
    client: StrictClient, model: str, engine: FakeEngine
) -> None:
    engine.script = Script(answers=("worst", "middle", "best"))
    answer = client.completions.create(model=model, prompt="x", n=2, best_of=3)
    assert [choice.text for choice in answer.choices] == ["best", "middle"]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].logprobs is None
    assert answer.usage.completion_tokens == len("worstmiddlebest")


def test_logprobs_are_parallel_lists(client: StrictClient, model: str, engine: FakeEngine) -> None:
    engine.script = Script(answers=("aöb",))
    answer = client.completions.create(model=model, prompt="x", logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["a", r"bytes:\xc3", r"bytes:\xb6", "b"]
    assert logprobs.text_offset == [0, 1, 1, 2]
    assert logprobs.token_logprobs == [-1.0] * 4
    # The fake engine's best tokens are below 128: where the chosen one is not, it comes on top.
    assert [len(top) for top in logprobs.top_logprobs] == [2, 3, 3, 2]


def test_scoring_a_prompt_as_lm_eval_does(
    http: httpx.Client, model: str, engine: FakeEngine
) -> None:
    body = post(http, model, prompt=[[97, 98, 99]], echo=True, logprobs=1, max_tokens=0)
    choice = body["choices"][0]
    assert choice["text"] == "abc"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -2.0]
    assert choice["logprobs"]["top_logprobs"] == [None, {"b": -2.0}, {"c": -2.0}]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] == 0


def test_echo_with_logprobs_goes_on_into_the_answer(
    http: httpx.Client, model: str, engine: FakeEngine
) -> None:
    engine.script = Script(answers=("!",))
    body = post(http, model, prompt="ab", echo=True, logprobs=0)
    assert body["choices"][0]["text"] == "ab!"
    assert body["choices"][0]["logprobs"]["tokens"] == ["a", "b", "!"]
    assert body["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2]


def test_echo_of_special_tokens_shows_them(http: httpx.Client, model: str) -> None:
    body = post(http, model, prompt=[97, 256], echo=True, max_tokens=1)
    assert body["choices"][0]["text"] == "a<|end|>H"


def test_stream_says_the_same_as_the_whole(http: httpx.Client, model: str) -> None:
    """Not through the strict client: its types forbid the nulls that the API has here."""
    fields = {"prompt": ["one", "two"], "n": 2, "echo": True, "logprobs": 1}
    whole = post(http, model, **fields)
    answer = http.post("/v1/completions", json={"model": model, "stream": True, **fields})
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    pieces = [json.loads(event)["choices"][0] for event in events[:-1]]
    for choice in whole["choices"]:
        mine = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in mine) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for piece in mine for value in piece["logprobs"][name]] == values
        assert [piece["finish_reason"] for piece in mine if piece["finish_reason"]] == ["stop"]


def test_stream_chunks_carry_finish_reason_and_usage(http: httpx.Client, model: str) -> None:
    fields = {"stream": True, "stream_options": {"include_usage": True}, "n": 2}
    answer = http.post("/v1/completions", json={"model": model, "prompt": "x", **fields})
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    assert '"choices":[]' in lines[-2]
    assert '"completion_tokens":28' in lines[-2]
    assert all('"finish_reason":' in line for line in lines[:-2])
    assert not any('"usage"' in line for line in lines[:-2])
    assert sum('"finish_reason":"stop"' in line for line in lines) == 2
