"""Decisions over the fake engine: what it is asked for, how its numbers are answered, and what is
refused.
"""

import json
import random
from collections.abc import Iterator, Sequence
from math import exp, fsum
from typing import Any

import httpx
import pytest
from openai import BadRequestError

from engine.values.request import Request
from server.generation import decisions
from server.settings import Settings
from tests.contract.access.helpers import client_of, key_file
from tests.contract.daemon import running
from tests.contract.fake_engine import END_OF_TEXT, FakeEngine, Gate, Script, listed_logprob
from tests.contract.scripted import Daemon, StrictClient
from tests.contract.wire import posted
from tests.polling import WAIT_SECONDS

pytestmark = pytest.mark.usefixtures("engine")  # each test starts from the default script

PATH = "/v1/decisions"
STATEMENT: dict[str, Any] = {"type": "predicate", "instructions": "It is late."}
TEAM: dict[str, Any] = {
    "type": "choice",
    "instructions": "Whose?",
    "choices": [{"value": "a"}, {"value": "b"}],
}
MOOD: dict[str, Any] = {
    "type": "score",
    "instructions": "How?",
    "levels": [{"label": "low"}, {"label": "high"}],
}


def body(*questions: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"input": "A parcel.", "questions": list(questions or (STATEMENT,)), **fields}


def submitted(engine: FakeEngine) -> list[Request]:
    return [engine.submitted.get_nowait() for _ in range(engine.submitted.qsize())]


def text_of(request: Request) -> str:
    return bytes(request.prompt).decode()


def error(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    found: dict[str, Any] = answer.json()["error"]
    return found


def expected(prompt: str, choices: Sequence[str]) -> list[float]:
    """The softmax of the choices' log-probabilities, each summed over all of its tokens, and over
    the end of the answer where another choice goes on.
    """
    totals = list[float]()
    for choice in choices:
        tokens = list(choice.encode())
        if any(other != choice and other.startswith(choice) for other in choices):
            tokens.append(END_OF_TEXT)
        before = list(prompt.encode())
        total = 0.0
        for token in tokens:
            total += listed_logprob(before, token)
            before.append(token)
        totals.append(total)
    weights = [exp(total - max(totals)) for total in totals]
    return [weight / fsum(weights) for weight in weights]


def close(found: Sequence[float], wanted: Sequence[float]) -> bool:
    return len(found) == len(wanted) and all(
        abs(one - other) < 1e-9 for one, other in zip(found, wanted, strict=True)
    )


def test_the_sdk_reads_answers_of_all_kinds(client: StrictClient, model: str) -> None:
    named = [{**question, "name": f"q{i}"} for i, question in enumerate((STATEMENT, TEAM))]
    typed = {
        "type": "choice",
        "instructions": [{"type": "input_text", "text": "Which?"}],
        "choices": [{"value": True}, {"value": "true", "description": "as a word"}],
    }
    decision = client.decisions.create(
        model=model,
        input=[{"role": "user", "content": [{"type": "input_text", "text": "A parcel."}]}],
        questions=[*named, MOOD, typed],
        prompt_cache_key="mine",
        prompt_cache_options={"ttl": "30m"},
        safety_identifier="someone",
    )
    predicate, team, mood, true = decision.answers
    assert [answer.type for answer in decision.answers] == [
        "predicate",
        "choice",
        "score",
        "choice",
    ]
    assert [answer.name for answer in decision.answers] == ["q0", "q1", None, None]
    assert 0 < predicate.probability < 1
    assert [one.value for one in team.probabilities] == ["a", "b"]
    best = max(team.probabilities, key=lambda one: one.probability)
    assert (team.choice, team.confidence) == (best.value, best.probability)
    assert [(one.value, one.label) for one in mood.probabilities] == [(0, "low"), (1, "high")]
    assert mood.score == pytest.approx(mood.probabilities[1].probability)
    assert mood.confidence == max(one.probability for one in mood.probabilities)
    assert [one.value for one in true.probabilities] == [True, "true"]
    assert decision.model == model
    usage = decision.usage
    details = usage.input_tokens_details
    assert usage.total_tokens == usage.input_tokens
    assert details.cached_tokens + details.cache_write_tokens == usage.input_tokens
    assert usage.output_tokens == usage.output_tokens_details.reasoning_tokens == 0


def test_probabilities_are_those_of_the_whole_choices(
    http: httpx.Client, engine: FakeEngine
) -> None:
    """Of choices that share beginnings, that begin others, and of one token, in any order."""
    generator = random.Random(4)
    for _ in range(20):
        values = list({_word(generator): None for _ in range(generator.randint(2, 12))})
        if len(values) < 2:
            continue
        question = {**TEAM, "choices": [{"value": value} for value in values]}
        answer = http.post(PATH, json=body(question)).json()["answers"][0]
        prompt = min((text_of(one) for one in submitted(engine)), key=len)
        found = [one["probability"] for one in answer["probabilities"]]
        assert close(found, expected(prompt, values)), values
        assert answer["confidence"] == max(found)
        assert answer["choice"] == values[found.index(max(found))]


def _word(generator: random.Random) -> str:
    return "".join(generator.choice("ab") for _ in range(generator.randint(1, 4)))


def test_the_input_is_computed_first_and_every_beginning_once(
    http: httpx.Client, engine: FakeEngine
) -> None:
    """Each request begins when what it goes on from has ended."""
    question = {**TEAM, "choices": [{"value": value} for value in ("red", "rest", "blue")]}
    usage = http.post(PATH, json=body(question, STATEMENT)).json()["usage"]
    head, *others = submitted(engine)
    assert head.max_tokens == 0
    assert text_of(head).startswith("A parcel.")
    assert all(text_of(other).startswith(text_of(head)) for other in others)
    assert len({other.prompt for other in others}) == len(others)
    assert len({one.id for one in (head, *others)}) == len(others) + 1
    order = [text_of(other) for other in others]
    roots = [text for text in order if text.endswith("Answer: ")]
    assert len(roots) == 2
    choice, statement = sorted(roots, key=lambda text: "Statement" in text)
    answers = [text.removeprefix(choice) for text in order if text.startswith(choice)]
    assert sorted(answers) == ["", "b", "bl", "blu", "r", "re", "res"]
    assert statement == next(text for text in order if text.startswith(statement))
    for text in order:
        if text not in roots:
            assert order.index(text[:-1]) < order.index(text)
    listed = {text_of(one): one.sampling.logprob_token_ids for one in others}
    assert bytes(sorted(listed[choice + "re"])) == b"ds"
    assert all(not one.speculate and one.max_tokens == 1 for one in others)
    assert usage["input_tokens"] == len(head.prompt) + sum(
        len(root) - len(head.prompt) for root in map(str.encode, roots)
    )


def test_what_only_one_choice_needs_is_not_kept(http: httpx.Client, engine: FakeEngine) -> None:
    http.post(PATH, json=body({**TEAM, "choices": [{"value": "abc"}, {"value": "xyz"}]}))
    shared = {text_of(one).rpartition("Answer: ")[2]: one for one in submitted(engine)}
    prompt = len(shared[""].prompt)
    kept = {answer: one.shared_tokens for answer, one in shared.items()}
    assert kept == {"": None, "a": None, "x": None, "ab": prompt, "xy": prompt}


def test_a_question_alone_is_one_request(http: httpx.Client, engine: FakeEngine) -> None:
    answer = http.post(PATH, json=body(TEAM)).json()
    (request,) = submitted(engine)
    assert answer["usage"]["input_tokens"] == len(request.prompt)
    assert bytes(request.sampling.logprob_token_ids) == b"ab"


def test_a_question_has_the_same_probabilities_alone_and_among_others(http: httpx.Client) -> None:
    together = http.post(PATH, json=body(STATEMENT, TEAM, MOOD)).json()["answers"]
    alone = [
        http.post(PATH, json=body(one)).json()["answers"][0] for one in (STATEMENT, TEAM, MOOD)
    ]
    assert together == alone


def test_a_conversation_and_its_calls_are_the_template_s(hermes: Daemon) -> None:
    """The question is in the user's last turn, or in a turn of its own."""
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_json", "data": {"a": [1, None]}}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"at": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "Found."},
        {"type": "custom_tool_call", "call_id": "d", "name": "say", "input": "Hi"},
        {
            "type": "custom_tool_call_output",
            "call_id": "d",
            "output": [{"type": "input_text", "text": "Said."}],
        },
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    hermes.openai.decisions.create(model="bytes", input=items, questions=[STATEMENT])
    messages = _longest(hermes)
    assert [message["role"] for message in messages][:2] == ["system", "user"]
    assert json.loads(messages[1]["content"]) == {"a": [1, None]}
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    assert [call["name"] for call in calls] == ["look", "say"]
    assert messages[-3]["content"] == "No."
    assert messages[-2]["role"] == "user"
    assert "It is late." in messages[-2]["content"] or "One" in messages[-2]["content"]
    assert messages[-1]["role"] == "assistant"
    hermes.openai.decisions.create(model="bytes", input="A parcel.", questions=[STATEMENT])
    assert [message["role"] for message in hermes.given[0]] == ["user", "assistant"]


def _longest(daemon: Daemon) -> list[dict[str, Any]]:
    given = daemon.engine.tokenizer.given  # type: ignore[attr-defined]
    return max((list(messages) for messages, _ in given), key=len)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"questions": []}, "questions"),
    ({"questions": [STATEMENT] * 401}, "questions"),
    ({"questions": [{"type": "predicate"}]}, "questions[0].instructions"),
    ({"questions": [{"type": "predicate", "instructions": " "}]}, "questions[0].instructions"),
    ({"questions": [{"type": "poem", "instructions": "?"}]}, "questions[0]"),
    ({"questions": [{**TEAM, "choices": [{"value": "a"}]}]}, "questions[0].choices"),
    (
        {"questions": [{**TEAM, "choices": [{"value": str(i)} for i in range(256)]}]},
        "questions[0].choices",
    ),
    ({"questions": [{**TEAM, "choices": [{"value": "a"}] * 2}]}, "questions[0].choices"),
    (
        {"questions": [STATEMENT, {**TEAM, "choices": [{"value": "a"}, {"value": ""}]}]},
        "questions[1].choices[1].value",
    ),
    (
        {"questions": [{**TEAM, "choices": [{"value": 1}, {"value": 2}]}]},
        "questions[0].choices[0].value",
    ),
    ({"questions": [{**MOOD, "levels": [{"label": "a"}]}]}, "questions[0].levels"),
    ({"questions": [{**MOOD, "levels": [{"label": "a"}, {"label": "a "}]}]}, "questions[0].levels"),
    ({"input": []}, "input"),
    ({"input": ""}, "input"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
    ({"input": [{"type": "reasoning"}]}, "input[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
    (
        {"input": [{"type": "function_call_output", "call_id": "x", "output": "a"}]},
        "input[0].call_id",
    ),
    ({"input": "long " * 200}, "input"),
    ({"stream": True}, "stream"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_what_cannot_be_decided_is_refused_by_its_field(
    http: httpx.Client, engine: FakeEngine, fields: dict[str, Any], param: str
) -> None:
    refusal = error(http.post(PATH, json=body() | fields))
    assert refusal["param"].startswith(param), refusal
    assert not submitted(engine)


def test_limits_are_named(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "MAX_TOKENS", 200)
    assert "at most 200" in error(http.post(PATH, json=body(*[STATEMENT] * 9)))["message"]
    many = {**TEAM, "choices": [{"value": str(at)} for at in range(255)]}
    refusal = error(http.post(PATH, json=body(*[many] * 79)))
    assert "20145" in refusal["message"]
    assert "at most 20000" in refusal["message"]


def test_the_sdk_raises_what_is_refused(client: StrictClient, model: str) -> None:
    with pytest.raises(BadRequestError, match="questions"):
        client.decisions.create(model=model, input="A", questions=[])


@pytest.fixture
def gate(engine: FakeEngine) -> Iterator[Gate]:
    """Closed at the first token; opened at the end, so that nothing hangs in the daemon."""
    gate = Gate()
    engine.script = Script(gate=gate)
    yield gate
    gate.open()


def test_leaving_aborts_all_questions(base_url: str, engine: FakeEngine, gate: Gate) -> None:
    """Those that run, and those that would have begun after them."""
    engine.script = Script(gate=gate, gate_after_tokens=1)
    with posted(base_url, PATH, body(STATEMENT, TEAM, MOOD)):
        ids = {engine.at_gate.get(timeout=WAIT_SECONDS) for _ in range(3)}
    assert {engine.aborted.get(timeout=WAIT_SECONDS) for _ in range(3)} == ids
    assert len(submitted(engine)) == 4


def test_a_failure_of_one_question_is_the_answer(http: httpx.Client, engine: FakeEngine) -> None:
    engine.script = Script(fails_after_tokens=0)
    assert http.post(PATH, json=body(STATEMENT, TEAM)).status_code == 500


def test_many_questions_count_as_one_request_of_the_key(tmp_path: Any) -> None:
    """And its tokens are those of the usage."""
    keys = key_file(tmp_path, alice={"requests_per_minute": 1, "concurrency": 1})
    engine = FakeEngine()
    settings = Settings(port=0, api_keys_file=keys)
    with running(engine, settings) as url, client_of(url, "alice") as alice:
        first = alice.post(PATH, json=body(*[STATEMENT] * 40))
        assert first.status_code == 200, first.text
        assert len(first.json()["answers"]) == 40
        assert alice.post(PATH, json=body()).status_code == 429
