"""An answer's parts as content blocks, whole and streamed."""

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from engine.values.output import OutputEvent
from server.dialects.calls import as_arguments
from server.generation.answer import ChatAnswer
from server.parsing.parts import AnswerPart, CallArguments, CallBegun, Content, Reasoning
from server.schemas.messages.answer import (
    Block,
    BlockDelta,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)

SIGNATURE = "cm9vdHN0b2Nr"
"""The signature of all thinking blocks. Clients send it back, and it is never checked."""

BlockEvent: TypeAlias = ContentBlockStart | ContentBlockDelta | ContentBlockStop


def _continues(part: AnswerPart, last: AnswerPart | None) -> bool:
    """Whether a part belongs to the same block as the last one."""
    match part:
        case CallBegun():
            return False
        case CallArguments():
            return True
        case _:
            return type(part) is type(last)


class BlockStream:
    """The events of one answer's blocks, one block after the other."""

    def __init__(self) -> None:
        self._index = -1
        self._last: AnswerPart | None = None

    def events(self, parts: Iterable[AnswerPart]) -> Iterator[BlockEvent]:
        for part in parts:
            if not _continues(part, self._last):
                yield from self.close()
                self._index += 1
                yield ContentBlockStart(
                    type="content_block_start", index=self._index, content_block=_begun(part)
                )
            self._last = part
            if (delta := _delta(part)) is not None:
                yield self._delta(delta)

    def close(self) -> Iterator[BlockEvent]:
        """The end of the open block, if there is one."""
        if isinstance(self._last, Reasoning):
            yield self._delta(SignatureDelta(type="signature_delta", signature=SIGNATURE))
        if self._last is not None:
            yield ContentBlockStop(type="content_block_stop", index=self._index)
        self._last = None

    def _delta(self, delta: BlockDelta) -> ContentBlockDelta:
        return ContentBlockDelta(type="content_block_delta", index=self._index, delta=delta)


def _begun(part: AnswerPart) -> Block:
    match part:
        case CallBegun(_, id, name):
            return ToolUseBlock(type="tool_use", id=id, name=name, input={})
        case Reasoning():
            return ThinkingBlock(type="thinking", thinking="", signature="")
        case _:
            return TextBlock(type="text", text="")


def _delta(part: AnswerPart) -> BlockDelta | None:
    match part:
        case Content(text):
            return TextDelta(type="text_delta", text=text)
        case Reasoning(text):
            return ThinkingDelta(type="thinking_delta", thinking=text)
        case CallArguments(_, text):
            return InputJsonDelta(type="input_json_delta", partial_json=text)
        case CallBegun():
            return None


class WholeMessage:
    """The blocks of an answer that is not streamed."""

    def __init__(self, answer: ChatAnswer) -> None:
        self.answer = answer
        self._last: AnswerPart | None = None
        self._blocks: list[tuple[AnswerPart, list[str]]] = []  # a first part and texts

    def add(self, event: OutputEvent) -> None:
        for part in self.answer.add(event):
            if not _continues(part, self._last):
                self._blocks.append((part, []))
            self._last = part
            if not isinstance(part, CallBegun):
                self._blocks[-1][1].append(part.text)

    def blocks(self) -> list[Block]:
        return [_block(first, "".join(texts)) for first, texts in self._blocks]


def _block(first: AnswerPart, text: str) -> Block:
    match first:
        case CallBegun(_, id, name):
            return ToolUseBlock(type="tool_use", id=id, name=name, input=as_arguments(text))
        case Reasoning():
            return ThinkingBlock(type="thinking", thinking=text, signature=SIGNATURE)
        case _:
            return TextBlock(type="text", text=text)
