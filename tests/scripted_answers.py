"""Answers whose parts are given: no text is parsed."""

from collections.abc import Iterator, Sequence
from typing import cast

from engine.values.model import Replay, Tokenizer
from engine.values.output import FinishReason, OutputEvent, Usage
from server.generation.choice import Choice
from server.generation.plan import AnswerPlan
from server.parsing.parts import AnswerPart

USAGE = Usage(prompt_tokens=7, cached_tokens=3, completion_tokens=5)
ADMISSION = Usage(prompt_tokens=7, cached_tokens=3, completion_tokens=0)


class ScriptedPlan:
    """A plan, and its parser, which returns the next of the parts for each event."""

    reasoning_end = ""

    def __init__(self, parts: Sequence[AnswerPart]) -> None:
        self._parts: Iterator[AnswerPart] = iter(parts)

    def stream(self) -> "ScriptedPlan":
        return self

    def add(self, text: str) -> list[AnswerPart]:
        return [part] if (part := next(self._parts, None)) else []

    def finish(self) -> list[AnswerPart]:
        return []

    def replay(self, tokens: Sequence[int], text: str, reasoning: str) -> Replay:
        return Replay(tuple(tokens), "", "", reasoning)


def scripted_choice(parts: Sequence[AnswerPart], tokenizer: Tokenizer | None = None) -> Choice:
    """An answer that gets one part from each event."""
    plan = cast(AnswerPlan, ScriptedPlan(parts))
    return Choice(plan, lambda turn, replay: None, tokenizer)


def events_of(
    parts: Sequence[AnswerPart], reason: FinishReason = FinishReason.STOP, index: int = 0
) -> list[OutputEvent]:
    """The events of the parts, their admission first; the last one ends the sequence."""
    return [
        OutputEvent("r", index, admission=ADMISSION),
        *(OutputEvent("r", index, text="x", token_ids=(1,)) for _ in parts),
        OutputEvent("r", index, finish_reason=reason, usage=USAGE),
    ]
