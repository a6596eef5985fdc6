"""Text behind a marker that turns out to be no call, short or long: what of it is content."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.parsing.answer import MAX_REPARSE_CHARACTERS, MarkedFormat, ReasoningFormat, ToolFormat
from server.parsing.formats.json_calls import HERMES, LLAMA3, MISTRAL
from server.parsing.formats.literal_calls import LFM2, PYTHONIC
from server.parsing.formats.xml_calls import MINIMAX_M2
from tests.profiles import examples
from tests.unit.parsing.answers import Answer, parsed, pieces

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
LONG = "word " * MAX_REPARSE_CHARACTERS
SOUP = {
    HERMES.name: (HERMES, ['<tool_call>{"id":[\\"', '"<', '{"arguments":{"k":"', CALL]),
    MISTRAL.name: (
        MISTRAL,
        ['[TOOL_CALLS][{"id":[\\"', '"]', "[TOOL_CALLS]f[ARGS]{}", "[CALL_ID]"],
    ),
    LLAMA3.name: (LLAMA3, ['<|python_tag|>{"id":[\\"', '"<', '<think></think>{"id":"', "{"]),
    LFM2.name: (LFM2, ["<|tool_call_start|>[f(", "k=1", ")]", '"k\\"']),
    MINIMAX_M2.name: (MINIMAX_M2, ["<minimax:tool_call>", "<invoke ", 'name="f"', ">"]),
}
SPACES = [" " * 200, "\n" * MAX_REPARSE_CHARACTERS, "k" * 200, " "]


def read(format: ToolFormat, *text: str) -> Answer:
    return parsed(MarkedFormat(ReasoningFormat("<think>", "</think>"), format), text, {"f": {}})


@pytest.mark.parametrize("behind", ["", "{", '{"id": 1}', '{"arguments": {"k": "odd"quote"}} '])
def test_a_call_behind_a_marker_that_is_none_is_a_call(behind: str) -> None:
    answer = read(HERMES, f"<tool_call>{behind}{CALL}")
    assert answer == Answer(f"<tool_call>{behind}".rstrip(), names=["f"], arguments=["{}"])


@pytest.mark.parametrize("key", ["arguments", "id"])
def test_what_comes_before_a_name_may_be_long(key: str) -> None:
    text = f'<tool_call>{{"{key}": {{"k": "{LONG}"}}, "name": "f"}}</tool_call>'
    arguments = {"k": LONG} if key == "arguments" else {}
    assert read(HERMES, text).calls == [("f", arguments)]


def test_of_a_long_text_that_is_no_call_the_last_characters_are_read_again() -> None:
    begin = f'<tool_call>{{"arguments": {{"k": "odd"quote" {CALL}{LONG}'
    answer = read(HERMES, begin + CALL)
    assert answer == Answer(begin.rstrip(), names=["f"], arguments=["{}"])


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


@pytest.mark.parametrize("family", SOUP)
@settings(max_examples=examples(40), deadline=None)
@given(data=st.data(), cuts=st.lists(st.integers(0, 20_000), max_size=20))
def test_what_is_no_call_is_the_same_wherever_it_is_cut(
    family: str, data: st.DataObject, cuts: list[int]
) -> None:
    format, fragments = SOUP[family]
    drawn = st.tuples(st.sampled_from([*fragments, *SPACES]), st.integers(1, 3))
    text = "".join(part * n for part, n in data.draw(st.lists(drawn, max_size=12)))
    whole = read(format, text)
    assert read(format, *pieces(text, cuts)) == whole
    assert whole.names or whole.reasoning or shown(whole.content) == shown(text)


def shown(text: str) -> str:
    """Without white space, which is dropped around reasoning, and without empty reasoning."""
    return "".join(text.split()).replace("<think></think>", "")
