"""Text behind a marker that turns out to be no call, short or long: what of it is content."""

import pytest

from server.parsing.answer import MarkedFormat, ReasoningFormat, ToolFormat
from server.parsing.formats.json_calls import HERMES, LLAMA3, MISTRAL
from server.parsing.formats.pythonic_calls import PYTHONIC
from tests.unit.parsing.answers import Answer, parsed

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def read(format: ToolFormat, *text: str) -> Answer:
    return parsed(MarkedFormat(ReasoningFormat("<think>", "</think>"), format), text, {"f": {}})


@pytest.mark.parametrize(
    ("format", "call"),
    [
        (HERMES, CALL),
        (LLAMA3, '{"name": "f", "parameters": {}}'),
        (MISTRAL, "[TOOL_CALLS]f[ARGS]{}"),
        (PYTHONIC, "[f()]"),
    ],
    ids=["hermes", "llama3_json", "mistral", "pythonic"],
)
@pytest.mark.parametrize("before", ["", "<think>Hm.</think>"])
@pytest.mark.parametrize("n", [255, 256, 257, 3000])
def test_white_space_before_a_call_may_be_long(
    format: ToolFormat, call: str, before: str, n: int
) -> None:
    answer = read(format, before + "\n" * n + call)
    assert (answer.content, answer.calls) == ("", [("f", {})])


@pytest.mark.parametrize("n", [300, 3000])
def test_white_space_between_a_marker_and_a_call_may_be_long(n: int) -> None:
    space = "\n" * n
    for behind in ("", "{", '{"id":'):
        answer = read(HERMES, f"<tool_call>{space}{behind}{space}{CALL}")
        said = f"<tool_call>{space}{behind}".rstrip()
        assert answer == Answer(said, names=["f"], arguments=["{}"])
