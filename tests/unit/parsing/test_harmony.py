"""Harmony: what becomes reasoning, content and calls."""

import pytest

from server.parsing.formats.harmony import TOOLS, Harmony
from server.parsing.reader import AnswerStream, CallArguments, CallBegun, Calls, Reader, Reasoning
from tests.unit.parsing.answers import Answer, parsed, pieces

DECLARED: dict[str, dict[str, object]] = {"f": {}, "g": {}}
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


def read(text: str, format: Harmony | None = None) -> Answer:
    """The answer, which is the same wherever its text is cut."""
    format = format or Harmony(TOOLS)
    answer = parsed(format, [text], DECLARED)
    assert parsed(format, text, DECLARED) == answer
    for cut in range(len(text)):
        assert parsed(format, pieces(text, [cut]), DECLARED) == answer
    return answer


@pytest.mark.parametrize("end", ["<|return|>", "<|end|>", ""])
def test_final_messages_are_content(end: str) -> None:
    text = f"{THOUGHT}<|channel|>final<|message|>I say: a < b <|x{end}"
    assert read(text) == Answer(content="I say: a < b <|x", reasoning="Hm.")


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.f <|constrain|>json",
        "<|channel|>commentary to=functions.f<|constrain|>json",
        "<|channel|>commentary to=functions.f json",
        "<|channel|>commentary to=f",
        "<|channel|>analysis to=functions.f code",
        " to=functions.f<|channel|>commentary json",
    ],
)
@pytest.mark.parametrize("end", ["<|call|>", "<|end|>", ""])
def test_what_is_addressed_to_a_function_is_a_call(header: str, end: str) -> None:
    text = f'{THOUGHT}{header}<|message|>{{"a": "<|call|>"}}{end}'
    assert read(text) == Answer(reasoning="Hm.", names=["f"], arguments=['{"a": "<|call|>"}'])


def test_a_call_may_come_first() -> None:
    answer = read(' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>')
    assert answer == Answer(names=["f"], arguments=['{"a": 1}'])


def test_an_answer_may_have_all_of_it() -> None:
    text = (
        f"{THOUGHT}<|channel|>analysis<|message|>Well.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f json<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>commentary to=functions.g json<|message|><|call|>"
        "<|start|>assistant<|channel|>final<|message|>Done."
    )
    assert read(text) == Answer(
        content="I look.\nDone.",
        reasoning="Hm.\nWell.",
        names=["f", "g"],
        arguments=["{}", "{}"],
    )


@pytest.mark.parametrize("recipient", ["browser.search", "python", "functions."])
def test_what_is_addressed_to_nobody_is_reasoning(recipient: str) -> None:
    text = f'<|channel|>analysis to={recipient} code<|message|>{{"q": 1}}<|call|>'
    assert read(text) == Answer(reasoning='{"q": 1}')


def test_without_tools_there_are_no_calls() -> None:
    text = f'{THOUGHT}<|channel|>commentary to=functions.f json<|message|>{{"a": 1}}<|call|>'
    assert read(text, Harmony(None)) == Answer(content='{"a": 1}', reasoning="Hm.")


@pytest.mark.parametrize("text", ['{"plain": "text"}', "\n a", "too", "<b>", "<|x|>"])
def test_text_in_no_message_is_content(text: str) -> None:
    assert read(text) == Answer(content=text)


@pytest.mark.parametrize("text", ["<|channel|>", "<|channel|>final", "<|start|>assistant<|end|>"])
def test_a_header_without_a_message_is_nothing(text: str) -> None:
    assert read(text) == Answer()


def test_a_message_without_an_end_ends_where_the_next_begins() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Yes.<|start|>assistant"
    assert read(text) == Answer(content="Yes.", reasoning="Hm.")


def test_text_and_arguments_are_streamed() -> None:
    reader = Reader()
    calls = Calls({}, lambda name, index: "id")
    stream = AnswerStream(reader, Harmony(TOOLS).read(reader, calls))
    stream.add("<|channel|>analysis<|message|>I")
    assert stream.add(" see") == [Reasoning(" see")]
    stream.add("<|end|><|start|>assistant<|channel|>commentary to=functions.f json")
    assert stream.add("<|message|>") == [CallBegun(0, "id", "f")]
    assert stream.add('{"a": "b') == [CallArguments(0, '{"a": "b')]
    assert stream.add("c") == [CallArguments(0, "c")]
