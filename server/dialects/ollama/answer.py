"""The answer of one sequence, and when it came."""

import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from engine.values.output import FinishReason, OutputEvent, TokenLogprob
from server.dialects.dialect import generated
from server.generation.answer import WrittenCall
from server.parsing.parts import AnswerPart, Content
from server.schemas.ollama.answer import DoneReason


class Answer(Protocol):
    """Takes in a sequence's events: a ChatAnswer, or a TextAnswer."""

    calls: list[WrittenCall]
    finish_reason: FinishReason

    @property
    def content(self) -> str: ...

    @property
    def reasoning(self) -> str: ...

    def add_all(self, events: Iterable[OutputEvent]) -> list[AnswerPart]:
        """The parts that the events complete together."""
        ...


class TextAnswer:
    """The answer to a raw prompt, in which nothing is looked for."""

    reasoning = ""

    def __init__(self) -> None:
        self.calls: list[WrittenCall] = []
        self.finish_reason = FinishReason.LENGTH
        self._texts: list[str] = []

    @property
    def content(self) -> str:
        return "".join(self._texts)

    def add_all(self, events: Iterable[OutputEvent]) -> list[AnswerPart]:
        texts = []
        for event in events:
            texts.append(event.text)
            self.finish_reason = event.finish_reason or self.finish_reason
        self._texts += texts
        return [Content(text)] if (text := "".join(texts)) else []


class Stopwatch:
    """When a request came, when the engine was asked, and when it said something first.

    In nanoseconds of a clock of its own.
    """

    def __init__(self) -> None:
        self._came = self._asked = time.perf_counter_ns()
        self._spoke: int | None = None

    def asked(self) -> None:
        self._asked = time.perf_counter_ns()

    def spoke(self) -> None:
        if self._spoke is None:
            self._spoke = time.perf_counter_ns()

    def durations(self) -> dict[str, int]:
        """The answer's durations, now that it has ended."""
        now = time.perf_counter_ns()
        spoke = now if self._spoke is None else self._spoke
        return {
            "total_duration": now - self._came,
            "load_duration": self._asked - self._came,
            "prompt_eval_duration": spoke - self._asked,
            "eval_duration": now - spoke,
        }


class TimedAnswer:
    """An answer on a stopwatch. One that is not streamed keeps its log-probabilities."""

    def __init__(self, answer: Answer, watch: Stopwatch) -> None:
        self.answer = answer
        self.logprobs: list[TokenLogprob] = []
        self._watch = watch

    def add(self, event: OutputEvent) -> None:
        self.logprobs += event.logprobs
        self.add_all([event])

    def add_all(self, events: Sequence[OutputEvent]) -> list[AnswerPart]:
        """The parts that the events complete together."""
        if generated(events):
            self._watch.spoke()
        return self.answer.add_all(events)

    @property
    def done_reason(self) -> DoneReason:
        return "length" if self.answer.finish_reason is FinishReason.LENGTH else "stop"
