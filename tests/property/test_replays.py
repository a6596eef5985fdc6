"""Whatever is generated and sent, the next prompt begins with the last one and its answer."""

import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.tokenizer import CheckpointTokenizer
from measuring.random_checkpoint import tiny_tokenizer
from tests.answering import (
    FAMILIES,
    OUTSPOKEN,
    THINKING,
    Answer,
    Conversation,
    checkpoint_of,
    ten_steps,
)
from tests.profiles import examples
from tests.property.test_control_tokens import CONTROL, KINDS, MARKUP

TEXT = st.lists(
    st.one_of(st.text(max_size=8), st.sampled_from([*CONTROL, *MARKUP, "\n", "tool_call", '{"a"'])),
    max_size=5,
).map("".join)
WORDS = st.text("abc de", min_size=1, max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=4,
)
CALLS = st.tuples(st.sampled_from(["look", "list"]), st.dictionaries(TEXT, VALUES, max_size=3))
SEEDS = st.integers(0, 2**32)


@cache
def checkpoint(template: str, kind: str = "") -> CheckpointTokenizer:
    return checkpoint_of(KINDS[kind]() if kind else tiny_tokenizer(), template)


def answers(name: str) -> st.SearchStrategy[Answer]:
    """What a model of the family may say. Content in which markers of reasoning are is not."""
    several = 3 if name in OUTSPOKEN else 1
    return st.builds(
        Answer,
        st.lists(CALLS, min_size=1, max_size=several).map(tuple),
        st.one_of(st.just(""), WORDS) if name in OUTSPOKEN else st.just(""),
        WORDS.filter(str.strip) if name in THINKING else st.just(""),
    )


@pytest.mark.parametrize("name", FAMILIES)
@settings(deadline=None, max_examples=examples(10))
@given(data=st.data(), question=TEXT, result=TEXT, seed=SEEDS)
def test_ten_steps(name: str, data: st.DataObject, question: str, result: str, seed: int) -> None:
    family = FAMILIES[name]
    talk = Conversation(family, checkpoint(family.template), random.Random(seed))
    talk.asks(question)
    said = (data.draw(answers(name)) for _ in range(10))
    for prompt, answer, following in ten_steps(talk, said, result):
        assert following[: len(prompt) + len(answer)] == prompt + answer


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=examples(30))
@given(question=WORDS, result=TEXT, run=st.lists(st.integers(0, 90), max_size=9), seed=SEEDS)
def test_kinds_of_tokenizers(
    kind: str, question: str, result: str, run: list[int], seed: int
) -> None:
    """Also those that write a space before a text or a word, and any tokens whatever."""
    family = FAMILIES["hermes"]
    talk = Conversation(family, checkpoint(family.template, kind), random.Random(seed))
    talk.asks(question)
    for _ in range(3):
        prompt = talk.prompt()
        talk.answers(Answer((("look", {"a": 1}),), "I look."), run)
        talk.returns(result)
        assert talk.prompt()[: len(prompt) + len(run)] == prompt + run
