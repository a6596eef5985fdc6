"""The answers that are remembered: found for the very message, within bounds."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.values.model import Replay
from server.generation.history import AssistantTurn, Call, Replays, same_json

SAID = AssistantTurn(
    (Call("c1", "look", {"a": 1, "b": [True, None]}), Call("c2", "list", {})), "I look."
)
REPLAY = Replay((1, 2, 3))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.0, 1.0, "", "1", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner),
    max_leaves=6,
)


def with_calls(*calls: Call) -> AssistantTurn:
    return replace(SAID, calls=calls)


def call(number: int) -> AssistantTurn:
    return AssistantTurn((Call(f"c{number}", "look", {}),))


@pytest.fixture
def replays() -> Replays:
    store = Replays()
    store.remember("", SAID, REPLAY)
    return store


FIRST, SECOND = SAID.calls
SAME = {
    "as it was sent": SAID,
    "with white space": replace(SAID, content="\n I look. "),
    "with keys in another order": with_calls(
        replace(FIRST, arguments={"b": [True, None], "a": 1}), SECOND
    ),
    "1.0 for 1": with_calls(replace(FIRST, arguments={"a": 1.0, "b": [True, None]}), SECOND),
}
OTHERS = {
    "other content": replace(SAID, content="I looked."),
    "no content": replace(SAID, content=None),
    "one call less": with_calls(FIRST),
    "one call more": with_calls(FIRST, SECOND, Call("c3", "list", {})),
    "calls in another order": with_calls(SECOND, FIRST),
    "another name": with_calls(replace(FIRST, name="see"), SECOND),
    "another value": with_calls(replace(FIRST, arguments={"a": 2, "b": [True, None]}), SECOND),
    "true for 1": with_calls(replace(FIRST, arguments={"a": True, "b": [True, None]}), SECOND),
    "another length": with_calls(replace(FIRST, arguments={"a": 1, "b": [True]}), SECOND),
    "another key": with_calls(replace(FIRST, arguments={"a": 1, "c": [True, None]}), SECOND),
    "arguments that are no object": with_calls(replace(FIRST, arguments="{"), SECOND),
    "reasoning that never was": replace(SAID, reasoning="hm"),
}


@pytest.mark.parametrize("message", SAME)
def test_the_message_is_found(replays: Replays, message: str) -> None:
    assert replays.find("", SAME[message]) is REPLAY


@pytest.mark.parametrize("message", OTHERS)
def test_an_edited_message_is_not(replays: Replays, message: str) -> None:
    assert replays.find("", OTHERS[message]) is None


def test_null_content_is_none_at_all() -> None:
    replays = Replays()
    replays.remember("", replace(SAID, content=""), REPLAY)
    assert replays.find("", replace(SAID, content=None)) is REPLAY


@pytest.mark.parametrize(("reasoning", "found"), [(None, True), ("hm\n", True), ("ha", False)])
def test_reasoning_is_missing_or_the_same(reasoning: str | None, found: bool) -> None:
    replays = Replays()
    replays.remember("", replace(SAID, reasoning="hm"), REPLAY)
    assert (replays.find("", replace(SAID, reasoning=reasoning)) is REPLAY) is found


def test_a_salt_keeps_tenants_apart(replays: Replays) -> None:
    assert replays.find("other", SAID) is None
    replays.remember("c1", with_calls(SECOND), REPLAY)
    assert replays.find("", with_calls(replace(SECOND, id="c1"), SECOND)) is None


def test_the_answer_that_was_not_asked_for_longest_is_forgotten() -> None:
    replays = Replays(max_answers=2)
    replays.remember("", call(1), REPLAY)
    replays.remember("", call(2), REPLAY)
    assert replays.find("", call(1)) is REPLAY
    replays.remember("", call(3), REPLAY)
    assert [replays.find("", call(n)) is REPLAY for n in (1, 2, 3)] == [True, False, True]


def test_tokens_are_bounded() -> None:
    replays = Replays(max_tokens=6)
    for number in (1, 2, 2, 3):
        replays.remember("", call(number), REPLAY)
    assert [replays.find("", call(n)) is REPLAY for n in (1, 2, 3)] == [False, True, True]
    replays.remember("", call(4), Replay((0,) * 7))
    assert [replays.find("", call(n)) for n in (1, 2, 3, 4)] == [None] * 4


def test_deep_arguments() -> None:
    deep: object = []
    for _ in range(100_000):
        deep = [deep]
    assert same_json(deep, deep)


def as_javascript(value: object) -> str:
    """What a client that has read it there writes, with its keys in order."""
    read = json.loads(json.dumps(value), parse_float=lambda text: round(float(text)))
    return json.dumps(read, sort_keys=True)


@given(one=JSON, other=JSON)
def test_same_json_is_the_same_when_sorted(one: object, other: object) -> None:
    """The floats among them are whole."""
    assert same_json(one, other) is (as_javascript(one) == as_javascript(other))
    assert same_json(one, json.loads(json.dumps(one)))


def test_the_same_ids_in_two_conversations_are_two_answers() -> None:
    """As of models that write the ids of their calls."""
    replays = Replays()
    one, other = (replace(SAID, conversation=conversation) for conversation in (b"1", b"2"))
    own = Replay((7,))
    replays.remember("", one, REPLAY)
    assert replays.find("", other) is None
    replays.remember("", other, own)
    assert replays.find("", one) is REPLAY
    assert replays.find("", other) is own
