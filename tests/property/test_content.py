"""Stop strings end an answer in its content alone, in whatever pieces it comes: the engine takes
for content what the parser does.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.output.content import ContentFinder
from server.parsing.answer import MarkedFormat, ReasoningFormat
from server.parsing.registry import TOOL_FORMATS
from tests.property.test_parsing import CUTS, FAMILIES, SOME
from tests.unit.parsing.answers import parsed, pieces

THINK = ReasoningFormat("<think>", "</think>")
TEXT = st.text(st.sampled_from("ab \n.:"), max_size=12).map(str.strip)


def content(format: MarkedFormat, parts: list[str], *, is_open: bool = False) -> str:
    """What the engine takes for content."""
    finder = ContentFinder(format.markup(is_open=is_open))
    runs = [run for part in parts for run in finder.add(part)] + finder.finish()
    assert "".join(run.text for run in runs) == "".join(parts)
    return "".join(run.text for run in runs if run.is_content)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "openai"])
@SOME
@given(data=st.data())
def test_what_is_no_reasoning_and_no_call_is_content(name: str, data: st.DataObject) -> None:
    family, tools = FAMILIES[name], TOOL_FORMATS[name]
    format = MarkedFormat(THINK, tools)
    reasoning, said = data.draw(TEXT), data.draw(TEXT)
    calls = data.draw(family.calls)
    written = family.write(calls[0])
    if tools.leading:
        said = ""
    text = (f"<think>\n{reasoning}\n</think>\n\n" if reasoning else "") + said + written
    whole = parsed(format, [text], calls[1]).content
    if whole == said and not any(end and end in str(calls[0]) for end in tools.ends):
        assert content(format, pieces(text, data.draw(CUTS))).strip() == said


@SOME
@given(TEXT, TEXT, CUTS)
def test_reasoning_that_the_prompt_has_begun_is_none(
    reasoning: str, said: str, cuts: list[int]
) -> None:
    text = f"{reasoning}</think>\n\n{said}"
    assert content(MarkedFormat(THINK, None), pieces(text, cuts), is_open=True).strip() == said


@SOME
@given(TEXT, CUTS)
def test_all_of_an_answer_without_markers_is_content(said: str, cuts: list[int]) -> None:
    assert content(MarkedFormat(THINK, None), pieces(said, cuts)) == said


def test_white_space_without_end_is_content() -> None:
    finder = ContentFinder(MarkedFormat(THINK, None).markup(is_open=False))
    assert any(run.is_content for _ in range(100) for run in finder.add("\n"))


def test_white_space_after_reasoning_is_no_content() -> None:
    assert content(MarkedFormat(THINK, None), ["a</think>", "\n", "\nb"], is_open=True) == "b"
    assert content(MarkedFormat(THINK, None), ["\n\nb"]) == "\n\nb"
