"""OpenAI's Harmony, which gpt-oss writes: an answer is messages, each to a channel.

A message is `<|start|>`, a header, `<|message|>`, text, and a marker that says why it ends; the
first one's `<|start|>assistant` is the prompt's. The header names the role, the `<|channel|>`, and
perhaps a recipient (`to=`) and the text's type. <https://github.com/openai/harmony>
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from engine.values.request import Markup
from server.parsing.answer import ReasoningFormat, ToolFormat
from server.parsing.json_text import read_arguments
from server.parsing.lark import CallSyntax, headed_call
from server.parsing.reader import AnswerPart, Calls, Content, Reader, Reading, Reasoning

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_NEXT = ("<|start|>", "<|channel|>")
_BEGINS = (*_NEXT, _MESSAGE, "to=functions.")
_FUNCTION = re.compile(r"functions\..")
_RECIPIENT = re.compile(r"\bto=([\w.:/-]{1,256})")


@dataclass(frozen=True, slots=True)
class Harmony:
    """A message to a function is a call if there are `tools`, analysis is reasoning, and all else
    is content: final messages, preambles of calls, and text outside messages, which a grammar may
    cause. A message to a tool that the model knows from training, such as `browser.search`, counts
    as reasoning, because it has no recipient.
    """

    tools: ToolFormat | None

    def markup(self, *, is_open: bool) -> Markup:
        """What in the text is no content: all but the text of final messages and preambles."""
        return Markup(_SPANS)

    def read(self, reader: Reader, calls: Calls, *, is_open: bool = False) -> Reading[None]:
        """Everything up to the end of the text. Each message says what it is, whatever `is_open`
        is.
        """
        content, reasoning = _Messages(Content), _Messages(Reasoning)
        while True:
            space = yield from reader.skip_space()
            if not (yield from reader.peek()):
                return
            header = yield from reader.starts(_BEGINS)
            if not header:
                reader.give_back(space)
            elif header != _MESSAGE:
                rest, found = yield from reader.collect([_MESSAGE, *_ENDS])
                header += rest
                if found != _MESSAGE:
                    continue
            recipient = _recipient(header)
            is_function = bool(_FUNCTION.match(recipient)) or calls.declares(recipient)
            if is_function and self.tools:
                yield from self.tools.read(reader, header, calls)
            elif "<|channel|>analysis" in header or (recipient and not is_function):
                yield from _read_text(reader, reasoning)
            else:
                yield from _read_text(reader, content)


_SPANS = (
    *((f"{before}<|channel|>analysis", "<|end|>") for before in ("", "<|start|>assistant")),
    *((f"{before}<|channel|>commentary to=", "<|call|>") for before in ("", "<|start|>assistant")),
    ("<|start|>assistant to=", "<|call|>"),
    *((begin, _MESSAGE) for begin in _NEXT),
    *zip(_ENDS, _ENDS, strict=True),
)


class _Messages:
    """Makes parts of the text of messages, with a line break between them."""

    def __init__(self, part: Callable[[str], AnswerPart]) -> None:
        self._part = part
        self._before, self._between = "", ""

    def begin(self) -> None:
        """Another message."""
        self._before = self._between

    def part(self, text: str) -> AnswerPart:
        """A slice of its text."""
        text, self._before, self._between = self._before + text, "", "\n"
        return self._part(text)


def _read_text(reader: Reader, messages: _Messages) -> Reading[None]:
    messages.begin()
    found = yield from reader.until([*_ENDS, *_NEXT], messages.part)
    _leave_next(reader, found.lstrip())


def _read_call(reader: Reader, header: str, calls: Calls) -> Reading[None]:
    yield calls.begin(_recipient(header).removeprefix("functions."))
    yield from read_arguments(reader, calls)
    _, found = yield from reader.collect([*_ENDS, *_NEXT])
    _leave_next(reader, found)


def _leave_next(reader: Reader, found: str) -> None:
    """A message that has no end is over where the next one begins."""
    if found in _NEXT:
        reader.give_back(found)


def _recipient(header: str) -> str:
    match = _RECIPIENT.search(header)
    return match[1] if match else ""


REASONING = ReasoningFormat(
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant",
    content="<|channel|>final<|message|>",
)

TOOLS = ToolFormat(
    "openai",
    ["<|channel|>commentary to=functions."],
    _read_call,
    CallSyntax(
        headed_call(" <|constrain|>json<|message|>"),
        begin="<|channel|>commentary to=functions.",
        end="<|call|>",
        between="<|start|>assistant",
    ),
)
"""`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>`: gpt-oss."""
