"""Answers whose parts are given: no text is parsed."""

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from engine.values.model import Replay, Tokenizer
from engine.values.output import FinishReason, OutputEvent, TokenLogprob, Usage
from server.generation.choice import Choice
from server.generation.plan import AnswerPlan
from server.parsing.reader import AnswerPart

USAGE = Usage(prompt_tokens=7, cached_tokens=3, completion_tokens=5)
ADMISSION = Usage(prompt_tokens=7, cached_tokens=3, completion_tokens=0)
TOKEN = ord("x")


class ScriptedParser:
    """A parser that returns the next of the parts for each event, whatever its text."""

    def __init__(self, parts: Sequence[AnswerPart]) -> None:
        self._parts = iter(parts)

    def add(self, text: str) -> list[AnswerPart]:
        return [part] if (part := next(self._parts, None)) else []

    def finish(self) -> list[AnswerPart]:
        return []


class ScriptedPlan:
    """A plan whose answers, one after the other, have the given parts."""

    reasoning_end = ""
    conversation = b""
    functions: Mapping[str, bytes] = {"look": b"{}"}

    def __init__(self, answers: Iterable[Sequence[AnswerPart]]) -> None:
        self._answers = iter(answers)

    def stream(self) -> ScriptedParser:
        return ScriptedParser(next(self._answers))

    def replay(self, tokens: Sequence[int], text: str, reasoning: str) -> Replay:
        return Replay(tuple(tokens), "", "", reasoning)


def scripted_plan(*answers: Sequence[AnswerPart]) -> AnswerPlan:
    """A plan whose answers get one of their parts from each event that has tokens."""
    return cast(AnswerPlan, ScriptedPlan(answers))


def scripted_choice(parts: Sequence[AnswerPart], tokenizer: Tokenizer | None = None) -> Choice:
    """An answer that gets one of the parts from each event that has tokens."""
    return Choice(scripted_plan(parts), lambda turn, replay: None, tokenizer)


def events_of(
    parts: Sequence[AnswerPart],
    reason: FinishReason = FinishReason.STOP,
    index: int = 0,
    logprobs: Sequence[TokenLogprob] = (),
) -> list[OutputEvent]:
    """The events of the parts, their admission first; the last one ends the sequence. Each token
    has `logprobs`.
    """
    grown = OutputEvent("r", index, text="x", token_ids=(TOKEN,), logprobs=tuple(logprobs))
    return [
        OutputEvent("r", index, admission=ADMISSION),
        *([grown] * len(parts)),
        OutputEvent("r", index, finish_reason=reason, usage=USAGE),
    ]
