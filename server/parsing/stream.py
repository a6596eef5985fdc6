"""An answer's parts, parsed while its text arrives."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from server.parsing.parts import AnswerPart, CallBegun
from server.parsing.reader import Reader, Reading


class AnswerStream:
    """The parser of one answer. `steps` parses what `reader` is given."""

    def __init__(self, reader: Reader, steps: Reading[None]) -> None:
        self._reader = reader
        self._steps = steps

    def add(self, text: str) -> list[AnswerPart]:
        """The parts that this text completes."""
        if not text:
            return []
        if (part := self._reader.plain_part(text)) is not None:
            return [part]
        self._reader.add(text)
        return self._run()

    def finish(self) -> list[AnswerPart]:
        """What is left when the answer is at its end."""
        self._reader.close()
        return self._run()

    def _run(self) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for part in self._steps:
            if part is not None:
                parts.append(part)
            elif not self._reader.advance():
                break
        return joined(parts)


def joined(parts: Sequence[AnswerPart]) -> list[AnswerPart]:
    """Consecutive parts of one kind joined into one."""
    result: list[AnswerPart] = []
    for _, same in groupby(parts, type):
        first, *others = same
        if isinstance(first, CallBegun) or not others:
            result += (first, *others)
        else:
            text = "".join(
                part.text for part in (first, *others) if not isinstance(part, CallBegun)
            )
            result.append(replace(first, text=text))
    return result
