"""Whether reasoning is open at the end of a prompt."""

import pytest

from server.generation.plan import Thinking
from server.parsing.answer import ReasoningFormat
from tests.unit.parsing.test_call_grammars import SpecialTokenizer

TOKENIZER = SpecialTokenizer(added_tokens={"<think>": 1022, "</think>": 1023})
THINK = ReasoningFormat("<think>", "</think>")
LONG = "step by step " * 60


def thinking(prompt: str, prefill: str = "", format: ReasoningFormat = THINK) -> Thinking:
    tokens = TOKENIZER.encode(prompt, add_special_tokens=False)
    return Thinking(TOKENIZER, format, tokens, prefill)


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("user: Hi\nassistant: <think>\n", "<think>\n"),
        ("assistant: <think>\nHere are my reasoning steps:\n", None),
        (f"assistant: <think>{LONG}", None),
        ("<think>a</think>b\nuser: c\nassistant: <think> d", "<think> d"),
        ("assistant: ", ""),
        ("assistant: <think>\n\n</think>\n\n", ""),
        ("assistant: <think>a</think>Well, ", ""),
        ("<think>a</think>b\nuser: c\nassistant: ", ""),
        ("", ""),
    ],
)
def test_it_is_open_after_a_marker_without_its_end(prompt: str, opened: str | None) -> None:
    expected = prompt[prompt.rfind("<think>") :] if opened is None else opened
    assert thinking(prompt).opened == expected
    assert thinking(prompt).is_open is bool(expected)


def test_a_marker_that_a_client_spells_opens_nothing() -> None:
    """As text it has other tokens than the template's."""
    spelled = [
        TOKENIZER.encode(part, add_special_tokens=False) for part in ("<th", "ink> is a tag")
    ]
    assert not Thinking(TOKENIZER, THINK, [*spelled[0], *spelled[1]]).is_open


@pytest.mark.parametrize(
    ("prefill", "opened"),
    [
        ("<think>\nSo, ", "<think>\nSo, "),
        ("<think>a</think>b", ""),
        ("plain", ""),
        ("<think>a</think><think>b", "<think>b"),
    ],
)
def test_the_beginning_of_an_answer_may_open_it(prefill: str, opened: str) -> None:
    assert thinking("assistant: ", prefill).opened == opened
