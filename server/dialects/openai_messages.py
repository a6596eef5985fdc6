"""The messages of OpenAI's chats, in which other dialects share the parts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from server.dialects.files import FileFields
from server.dialects.openai_tools import ForeignCall, FunctionCall, ToolCalls
from server.errors import UNSUPPORTED
from server.generation import conversation
from server.generation.conversation import MAX_PARTS, ROLES, Text, texts
from server.generation.foreign_history import foreign_note, joined
from server.generation.tools import ToolCall
from server.json_model import ByType, ReadAs, RequestModel, any_of, present


class TextPart(RequestModel):
    """One part of a message's content. Text is the only kind that is served, and files of text."""

    type: str = Field(json_schema_extra={"const": "text"})
    text: str

    @field_validator("type")
    @classmethod
    def _text_alone(cls, kind: str) -> str:
        if kind != "text":
            message = "parts of type '{kind}' are not supported, only 'text'"
            raise PydanticCustomError(UNSUPPORTED, message, {"kind": kind[:64]})
        return kind

    def value(self) -> Text:
        return Text(self.text)


class FilePart(RequestModel):
    """A file of text."""

    type: Literal["file"]
    file: FileFields

    def value(self) -> Text:
        return Text(self.file.required_text())


def _text(text: object) -> dict[str, object]:
    return {"type": "text", "text": text}


def as_parts(content: object) -> object:
    """A string as one part of text."""
    if isinstance(content, str):
        return [_text(content)]
    if not isinstance(content, list):
        raise PydanticCustomError("content", "must be a string or a list of parts")
    return content


_TextParts = Annotated[
    list[Annotated[Text, ReadAs(Annotated[TextPart | FilePart, ByType(TextPart)])]],
    Field(max_length=MAX_PARTS, fail_fast=True),
]
Content = Annotated[_TextParts, BeforeValidator(as_parts, json_schema_input_type=str | _TextParts)]


NEEDS_NO_CONTENT = ("assistant", "tool", "function")
"""Roles whose content may be null: there are calls, or a function returned nothing."""

FUNCTION_CALL_ID = "function1"
"""The id of a `function_call`, which has none: its result follows it. Mistral's templates take nine
letters and digits."""


class Message(RequestModel):
    model_config = any_of(
        {"properties": {"role": {"enum": list(NEEDS_NO_CONTENT)}}},
        present(content={"type": ["string", "array"]}),
    )

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    refusal: str | None = None  # before content, which it becomes a part of
    content: Content | None = Field(None, validate_default=True)
    name: str | None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None  # OpenAI's older form of tool_calls
    reasoning_content: str | None = None
    reasoning: str | None = None  # reasoning_content, as some clients spell it

    @field_validator("content", mode="before")
    @classmethod
    def _refusals_are_text(cls, content: object, info: ValidationInfo) -> object:
        """The words with which an assistant refused, in parts of `content` or in `refusal` as
        OpenAI's models give them, are text that it said.
        """
        if info.data.get("role") != "assistant":
            return content
        refusal = info.data.get("refusal")
        parts = as_parts(content) if content and isinstance(content, str) else content
        if refusal and not parts:
            return [_text(refusal)]
        if not isinstance(parts, list):
            return content
        texts = [
            _text(part.get("refusal"))
            if isinstance(part, dict) and part.get("type") == "refusal"
            else part
            for part in parts
        ]
        return [*texts, _text(refusal)] if refusal else texts

    @model_validator(mode="after")
    def _content_required_by_role(self) -> Self:
        if self.content is None and self.role not in NEEDS_NO_CONTENT:
            message = "a message of role '{role}' needs content"
            raise PydanticCustomError("content", message, {"role": self.role})
        return self

    def value(self) -> "ChatTurn":
        """The message. A `function_call` is a call like any other, unless there are others."""
        given, older = self.tool_calls or [], self.function_call
        if not given and older is not None:
            given = [ToolCall(FUNCTION_CALL_ID, older.name, older.arguments)]
        foreign = [call for call in given if isinstance(call, ForeignCall)]
        parts, notes = tuple(self.content or ()), [call.note for call in foreign if call.note]
        answered = FUNCTION_CALL_ID if self.role == "function" else None
        message = conversation.Message(
            role=ROLES[self.role],
            parts=texts(joined([*(part.text for part in parts), *notes])) if notes else parts,
            reasoning=self.reasoning_content or self.reasoning or "",
            calls=tuple(call for call in given if isinstance(call, ToolCall)),
            answered_call=self.tool_call_id or answered,
            name=self.name,
        )
        return ChatTurn(message, foreign)


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A message, whose text tells of its calls of tools of other kinds."""

    message: conversation.Message
    foreign: Sequence[ForeignCall]


ChatMessage = Annotated[ChatTurn, ReadAs(Message)]


def chat_history(turns: Iterable[ChatTurn]) -> list[conversation.Message]:
    """The messages. What a call of another kind returned is what the user says: no template knows
    of such a call.
    """
    messages, kinds = list[conversation.Message](), dict[str, str]()
    for turn in turns:
        message = turn.message
        kinds |= {call.id: call.kind for call in turn.foreign if call.id}
        for call in message.calls:
            kinds.pop(call.id, None)
        kind = kinds.get(message.answered_call or "") if message.role == "tool" else None
        if kind is None:
            messages.append(message)
        elif (note := foreign_note(f"{kind} result", {"text": message.text})) is not None:
            messages.append(conversation.Message(role="user", parts=texts(note)))
    return messages
