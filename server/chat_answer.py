"""What a chat's answer consists of, as the engine's events come in."""

from dataclasses import dataclass, field

from engine.types import FinishReason, OutputEvent, TokenLogprob
from server.generation import UsageMeter
from server.parsing.parts import CallArguments, CallBegun, Content, Part, Reasoning
from server.parsing.stream import AnswerStream


class AnswerReader:
    """Turns one sequence's events into parts, and tells the meter of the tokens of its reasoning.

    A token counts as reasoning if the text that it completes does, or, where it completes none, if
    the text before it did.
    """

    def __init__(self, stream: AnswerStream, meter: UsageMeter) -> None:
        self._stream = stream
        self._meter = meter
        self._is_thinking = False
        self.has_calls = False
        self.token_ids: list[int] = []
        self.text = ""

    def add(self, event: OutputEvent) -> list[Part]:
        parts = self._stream.add(event.text)
        if event.finish_reason is not None:
            parts += self._stream.finish()
        self.token_ids += event.token_ids
        self.text += event.text
        self.has_calls = self.has_calls or any(isinstance(part, CallBegun) for part in parts)
        if isinstance(parts[0], Reasoning) if parts else self._is_thinking:
            self._meter.reasoning_tokens += len(event.token_ids)
        if parts:
            self._is_thinking = isinstance(parts[-1], Reasoning)
        return parts


@dataclass(slots=True)
class Call:
    """A call that an answer makes. `arguments` are JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ChatAnswer:
    """Everything that one sequence said."""

    reader: AnswerReader
    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.LENGTH

    def add(self, event: OutputEvent) -> None:
        self.logprobs += event.logprobs
        self.finish_reason = event.finish_reason or self.finish_reason
        for part in self.reader.add(event):
            self._take(part)

    def _take(self, part: Part) -> None:
        match part:
            case Content(text):
                self.content += text
            case Reasoning(text):
                self.reasoning += text
            case CallBegun(_, id, name):
                self.calls.append(Call(id, name))
            case CallArguments(index, text):
                self.calls[index].arguments += text
