"""Parsing whole answers, in whatever pieces they come."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from server.parsing.reader import (
    AnswerPart,
    AnswerStream,
    CallArguments,
    CallBegun,
    Calls,
    Content,
    Reader,
    Reasoning,
)
from server.parsing.registry import AnswerFormat


@dataclass
class Answer:
    """All parts of an answer, joined by kind."""

    content: str = ""
    reasoning: str = ""
    names: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list, compare=False)

    @property
    def calls(self) -> list[tuple[str, Any]]:
        """Names, and arguments as values."""
        return list(zip(self.names, map(json.loads, self.arguments), strict=True))

    def add(self, part: AnswerPart) -> None:
        match part:
            case Content(text):
                self.content += text
            case Reasoning(text):
                self.reasoning += text
            case CallBegun(index, id, name):
                assert index == len(self.names)
                assert id
                self.names.append(name)
                self.ids.append(id)
                self.arguments.append("")
            case CallArguments(index, text):
                assert index == len(self.names) - 1, "a slice of a call that is over"
                self.arguments[index] += text


def parsed(
    format: AnswerFormat,
    pieces: Iterable[str],
    tools: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    is_open: bool = False,
) -> Answer:
    """The answer whose text comes in these pieces."""
    reader = Reader()
    ids = iter(range(1000))
    calls = Calls(tools or {}, lambda name, index: f"id-{next(ids)}")
    stream = AnswerStream(reader, format.read(reader, calls, is_open=is_open))
    answer = Answer()
    for piece in pieces:
        for part in stream.add(piece):
            answer.add(part)
    for part in stream.finish():
        answer.add(part)
    return answer


def pieces(text: str, cuts: Sequence[int]) -> list[str]:
    """The text cut at these places."""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(places)]
