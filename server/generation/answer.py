"""The answer of a chat, put together from the engine's events."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.values.model import Replay
from engine.values.output import FinishReason, OutputEvent, TokenLogprob
from server.generation.events import UsageMeter
from server.generation.plan import AnswerPlan
from server.generation.replays import AssistantTurn, Call
from server.parsing.parts import AnswerPart, CallArguments, CallBegun, Content, Reasoning
from server.parsing.stream import joined

Remember = Callable[[AssistantTurn, Replay], None]
"""Called with an answer that has tool calls, and with its tokens."""


@dataclass(slots=True)
class WrittenCall:
    """A tool call of an answer."""

    id: str
    name: str
    slices: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        """JSON text."""
        return "".join(self.slices)


class ChatAnswer:
    """One sequence's events as parts, and the whole answer.

    Adds the tokens of the reasoning to the meter: a token counts as reasoning if the text that it
    completes is, or, where it completes none, if the text before was. The end marker counts.
    """

    def __init__(self, plan: AnswerPlan, meter: UsageMeter, remember: Remember) -> None:
        self._plan = plan
        self._stream = plan.stream()
        self._meter = meter
        self._remember = remember
        self._is_thinking = False
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._end_of_text = ""  # as much as may begin the marker that ends reasoning
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[WrittenCall] = []
        self.finish_reason = FinishReason.LENGTH
        self.stopped_by: str | int | None = None

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    def add(self, event: OutputEvent) -> list[AnswerPart]:
        """The parts that the event completes."""
        parts = self._stream.add(event.text)
        if event.finish_reason is not None:
            parts += self._stream.finish()
        self._token_ids += event.token_ids
        self._texts.append(event.text)
        if isinstance(parts[0], Reasoning) if parts else self._is_thinking:
            self._meter.reasoning_tokens += len(event.token_ids)
        for part in parts:
            self._take(part)
        if self._ends_reasoning(event.text):
            self._is_thinking = False
        if event.finish_reason is not None:
            self._end(event.finish_reason, event.stopped_by)
        return parts

    def add_all(self, events: Iterable[OutputEvent]) -> list[AnswerPart]:
        """The parts that the events complete together."""
        return joined([part for event in events for part in self.add(event)])

    def _ends_reasoning(self, text: str) -> bool:
        """Whether the marker that ends reasoning is complete with this text, the latest."""
        marker = self._plan.reasoning_end
        if not marker:
            return False
        seen = self._end_of_text + text
        self._end_of_text = seen[-len(marker) :]
        return marker in seen

    def _take(self, part: AnswerPart) -> None:
        self._is_thinking = isinstance(part, Reasoning)
        match part:
            case Content(text):
                self._content.append(text)
            case Reasoning(text):
                self._reasoning.append(text)
            case CallBegun(_, id, name):
                self.calls.append(WrittenCall(id, name))
            case CallArguments(index, text):
                self.calls[index].slices.append(text)

    def _end(self, reason: FinishReason, stopped_by: str | int | None) -> None:
        self.finish_reason, self.stopped_by = reason, stopped_by
        if reason is not FinishReason.STOP or isinstance(stopped_by, str) or not self.calls:
            return
        tokens = self._token_ids if stopped_by is None else self._token_ids[:-1]
        try:
            calls = [Call(call.id, call.name, json.loads(call.arguments)) for call in self.calls]
        except (ValueError, RecursionError):
            return  # broken arguments: no client sends them back
        turn = AssistantTurn(calls, self.content, self.reasoning)
        self._remember(turn, self._plan.replay(tokens, "".join(self._texts), self.reasoning))


@dataclass(slots=True)
class WholeAnswer:
    """An answer that is not streamed, with its logprobs."""

    answer: ChatAnswer
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, event: OutputEvent) -> None:
        self.logprobs += event.logprobs
        self.answer.add(event)
