"""A conversation as OpenAI's chats have it, which several dialects' bodies are or contain."""

from typing import Annotated, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from server.dialects.files import FileFields
from server.dialects.openai_tools import ChatTool, ChatToolChoice, FunctionCall, ToolCalls
from server.dialects.thinking_fields import ThinkingFields
from server.errors import UNSUPPORTED
from server.generation import conversation
from server.generation.conversation import (
    MAX_MESSAGES,
    MAX_PARTS,
    ROLES,
    Text,
    check_choice,
    check_continued,
    check_messages,
    check_tools,
)
from server.generation.request_fields import PromptRequest
from server.generation.tools import (
    MAX_TOOLS,
    ToolCall,
    ToolChoice,
)
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

    def value(self) -> conversation.Message:
        """The message. A `function_call` is a call like any other, unless there are others."""
        calls, older = self.tool_calls or [], self.function_call
        if not calls and older is not None:
            calls = [ToolCall(FUNCTION_CALL_ID, older.name, older.arguments)]
        answered = FUNCTION_CALL_ID if self.role == "function" else None
        return conversation.Message(
            role=ROLES[self.role],
            parts=tuple(self.content or ()),
            reasoning=self.reasoning_content or self.reasoning or "",
            calls=tuple(calls),
            answered_call=self.tool_call_id or answered,
            name=self.name,
        )


ChatMessage = Annotated[conversation.Message, ReadAs(Message)]


class ConversationFields(PromptRequest, ThinkingFields):
    """The fields of a conversation. Validation makes the values of it, which are checked in whole
    before a model is loaded for them.
    """

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    tools: list[ChatTool] = Field(default_factory=list, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: ChatToolChoice = Field(
        default_factory=ToolChoice, json_schema_extra={"default": "auto"}
    )
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _make_a_conversation(self) -> Self:
        if self.messages:
            check_messages(self.messages, "messages")
        check_tools(self.tools, "tools")
        check_choice(self.tool_choice, self.tools)
        if self.continue_final_message:
            check_continued(self.messages, "continue_final_message")
        return self

    @property
    def conversation(self) -> conversation.Conversation:
        """The conversation of these fields."""
        return conversation.Conversation(
            messages=self.messages,
            tools=self.tools,
            tool_choice=self.tool_choice,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            cache_salt=self.cache_salt,
            **self.thinking_choice.conversation_fields,
        )
