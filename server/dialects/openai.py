"""Common parts of OpenAI's dialects: a chat's conversation, usage, chunks."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError, to_json
from typing_extensions import TypedDict

from engine.values.output import FinishReason
from server.dialects.error_shapes import openai_error
from server.dialects.files import FileFields
from server.dialects.image_fields import ImageUrlPart
from server.dialects.job import StreamWriter, wire_json
from server.dialects.openai_tools import (
    AllowedToolChoice,
    ChatFunctionTool,
    ChatTool,
    ChatToolChoice,
    DroppedTool,
    ForeignCall,
    FunctionCall,
    FunctionChoice,
    FunctionDeclaration,
    NamedChoice,
    NamedFunction,
    ToolCalls,
)
from server.dialects.thinking_fields import ThinkingFields
from server.errors import SERVER, UNSUPPORTED, ApiError
from server.generation import conversation
from server.generation.choice import AnswerUsage
from server.generation.conversation import (
    MAX_MESSAGES,
    MAX_PARTS,
    ROLES,
    Conversation,
    ImagePart,
    Part,
    Text,
    check_choice,
    check_continued,
    check_messages,
    check_tools,
    placed_images,
    texts,
)
from server.generation.foreign_fields import Unsupported
from server.generation.foreign_history import foreign_note, joined, log_dropped, log_foreign
from server.generation.progress import ProgressBody
from server.generation.request_fields import ModelsTemplate, PromptRequest
from server.generation.requests import ServedModel
from server.generation.tools import MAX_TOOLS, Tool, ToolCall, ToolChoice, ToolMode
from server.http.stream import EVENT_STREAM, KEEP_ALIVE, escape_line_ends, sse_data
from server.json_model import NULL, ByType, ReadAs, RequestModel, any_of, present


class TextPart(RequestModel):
    """One part of a message's content: text, where its type is that of no other part."""

    type: str = Field(json_schema_extra={"const": "text"})
    text: str

    @field_validator("type")
    @classmethod
    def _text_alone(cls, kind: str) -> str:
        if kind != "text":
            message = "parts of type '{kind}' are not supported, only 'text' and images"
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
TextContent = Annotated[
    _TextParts, BeforeValidator(as_parts, json_schema_input_type=str | _TextParts)
]

_Parts = Annotated[
    list[Annotated[Part, ReadAs(Annotated[TextPart | FilePart | ImageUrlPart, ByType(TextPart)])]],
    Field(max_length=MAX_PARTS, fail_fast=True),
]
Content = Annotated[_Parts, BeforeValidator(as_parts, json_schema_input_type=str | _Parts)]


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
        notes = [call.note for call in foreign if call.note]
        parts: tuple[Part, ...] = tuple(self.content or ())
        answered = FUNCTION_CALL_ID if self.role == "function" else None
        if notes:
            images = [part for part in parts if isinstance(part, ImagePart)]
            said = [part.text for part in parts if isinstance(part, Text)]
            parts = (*texts(joined([*said, *notes])), *images)
        message = conversation.Message(
            role=ROLES[self.role],
            parts=parts,
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
    for index, turn in enumerate(turns):
        message = placed_images(turn.message, f"messages[{index}].content")
        kinds |= {call.id: call.kind for call in turn.foreign if call.id}
        for call in message.calls:
            kinds.pop(call.id, None)
        kind = kinds.get(message.answered_call or "") if message.role == "tool" else None
        if kind is None:
            messages.append(message)
        elif (note := foreign_note(f"{kind} result", {"text": message.text})) is not None:
            parts = (*texts(note), *message.images)
            messages.append(conversation.Message(role="user", parts=parts))
    return messages


def served_tools(tools: Iterable[Tool | DroppedTool]) -> list[Tool]:
    """The tools that the model can call."""
    return [tool for tool in tools if isinstance(tool, Tool)]


def dropped_kinds(tools: Iterable[Tool | DroppedTool]) -> Counter[str]:
    """The number of tools of each kind that is not served."""
    return Counter(tool.kind for tool in tools if isinstance(tool, DroppedTool))


def chosen(
    choice: ToolMode | NamedChoice | AllowedToolChoice, tools: Sequence[Tool | DroppedTool]
) -> ToolChoice:
    """The choice in terms of the tools that are left. It is `auto` where none is left of those that
    have to be called, and `none` where none is left of those that are allowed.
    """
    served = {tool.name for tool in served_tools(tools)}
    dropped = dropped_kinds(tools).keys() - served
    match choice:
        case AllowedToolChoice(allowed_tools=allowed):
            names = frozenset(tool.name for tool in allowed.tools) - dropped
            return ToolChoice(allowed.mode, names) if names else ToolChoice("none")
        case str():
            is_left = choice != "required" or served or not dropped
            return ToolChoice(choice) if is_left else ToolChoice()
        case _ if choice.name in dropped:
            return ToolChoice()
        case _:
            return ToolChoice("required", frozenset({choice.name}))


class ConversationFields(PromptRequest, ThinkingFields):
    """The fields of a conversation. Validation makes the values of it, which are checked in whole
    before a model is loaded for them.
    """

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    tools: list[ChatTool] = Field(default_factory=list, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: ChatToolChoice = "auto"
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _make_a_conversation(self) -> Self:
        messages, tools = chat_history(self.messages), served_tools(self.tools)
        if self.messages:
            check_messages(messages, "messages")
        check_tools(tools, "tools")
        check_choice(chosen(self.tool_choice, self.tools), tools)
        if self.continue_final_message:
            check_continued(messages, "continue_final_message")
        return self

    @property
    def conversation(self) -> conversation.Conversation:
        """The conversation of these fields."""
        return conversation.Conversation(
            messages=chat_history(self.messages),
            tools=served_tools(self.tools),
            tool_choice=chosen(self.tool_choice, self.tools),
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            cache_salt=self.cache_salt,
            **self.thinking_choice.conversation_fields,
        )

    def log_unserved(self, request_id: str) -> None:
        """Log what is not served of other servers' kinds."""
        if calls := [call for turn in self.messages for call in turn.foreign]:
            log_foreign(Counter(call.kind for call in calls), request_id)
        if dropped := dropped_kinds(self.tools):
            log_dropped(dropped, request_id)


class CompletionTokensDetails(TypedDict):
    """OpenAI's names. Drafts count whatever they were taken from, a prediction or not."""

    reasoning_tokens: int
    accepted_prediction_tokens: Annotated[
        int, Field(description="Accepted draft tokens of the completion.")
    ]
    rejected_prediction_tokens: Annotated[
        int, Field(description="Drafted tokens that were wrong. They are in no other count.")
    ]


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class UsageBody(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


WireFinishReason = Literal["stop", "length", "repetition"]

DONE = sse_data(b"[DONE]")

WIRE_FINISH_REASONS: dict[FinishReason, WireFinishReason] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.REPETITION: "repetition",
}


class ResponseFields(TypedDict, closed=True):
    """The fields that a response and all its chunks begin with."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


def response_fields(prefix: str, id: str, model: ServedModel) -> ResponseFields:
    """The fields of a response, whose `object` is empty: each form has its own."""
    return {
        "id": f"{prefix}-{id}",
        "object": "",
        "created": int(time.time()),
        "model": model.name,
        "system_fingerprint": model.fingerprint,
    }


class ChunkWriter(StreamWriter):
    """A StreamWriter of chunks: a JSON object per event, comments as keep-alives, then [DONE].

    All chunks of a stream are `empty`, a chunk without choices, but for their choice. It is
    rendered once.
    """

    media_type = EVENT_STREAM
    nothing: bytes
    """A choice that says nothing, as JSON."""

    def __init__(self, empty: Mapping[str, object], *, include_usage: bool) -> None:
        self._empty = empty
        self._include_usage = include_usage
        self._head, self._tail = sse_data(to_json(empty)).split(_NO_CHOICES)

    def chunk(self, choice: bytes) -> bytes:
        """The event of a chunk with this choice, as JSON."""
        return b'%b"choices":[%b]%b' % (self._head, escape_line_ends(choice), self._tail)

    def progress(self, body: ProgressBody) -> bytes:
        """A chunk as llama.cpp has it: with a choice, since clients look at the first."""
        fields = to_json({"prompt_progress": body})[1:-1]
        return self.chunk(self.nothing).replace(b'"choices":', b'%b,"choices":' % fields, 1)

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def failure(self, error: ApiError) -> bytes:
        return sse_data(wire_json(openai_error(error)))

    def end(self, usage: AnswerUsage) -> bytes:
        if not self._include_usage:
            return DONE
        return sse_data(to_json({**self._empty, "usage": usage_fields(usage)})) + DONE


_NO_CHOICES = b'"choices":[]'
"""It contains quotes, so no text in JSON can equal it."""


def usage_fields(usage: AnswerUsage) -> UsageBody:
    """The tokens of an answer under OpenAI's names."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_draft_tokens,
            "rejected_prediction_tokens": usage.rejected_draft_tokens,
        },
    }


def wire_finish_reason(reason: FinishReason | None) -> WireFinishReason:
    """Raises ApiError (500) for a sequence that has not finished."""
    if reason not in WIRE_FINISH_REASONS:
        raise ApiError(500, "The request did not complete.", type=SERVER, code="internal_error")
    return WIRE_FINISH_REASONS[reason]


class ChatConversation(ConversationFields):
    """The conversation of a chat's body. Fields of vLLM that would change the prompt are
    refused.
    """

    functions: Annotated[list[FunctionDeclaration], Field(max_length=MAX_TOOLS, fail_fast=True)] = (
        Field(default_factory=list, description="The older form of tools.")
    )
    function_call: FunctionChoice = Field("auto", description="The same of tool_choice.")
    chat_template: ModelsTemplate = ""
    documents: Unsupported = None

    @field_validator("functions")
    @classmethod
    def _not_beside_tools(
        cls, functions: list[FunctionDeclaration], info: ValidationInfo
    ) -> list[FunctionDeclaration]:
        if functions and info.data.get("tools"):
            raise PydanticCustomError("functions", "give either tools or functions")
        return functions

    @field_validator("function_call")
    @classmethod
    def _callable(cls, choice: FunctionChoice, info: ValidationInfo) -> FunctionChoice:
        names = {function.name for function in info.data.get("functions", ())}
        if isinstance(choice, NamedFunction) and choice.name not in names:
            message = "functions has no '{name}'"
            raise PydanticCustomError("function_call", message, {"name": choice.name})
        return choice

    @property
    def conversation(self) -> Conversation:
        """The conversation of these fields: `functions` are tools like any others."""
        fields = super().conversation
        if not self.functions:
            return fields
        tools = [ChatFunctionTool(type="function", function=each) for each in self.functions]
        choice = self.function_call
        return replace(
            fields,
            tools=[tool.value() for tool in tools],
            tool_choice=ToolChoice("required", frozenset({choice.name}))
            if isinstance(choice, NamedFunction)
            else ToolChoice(choice),
        )


def messages_or(prompt: JsonSchemaValue) -> ConfigDict:
    """The configuration of a MessagesOrPrompt whose prompt has this schema."""
    return any_of(
        {
            "properties": {"messages": {"type": "array", "minItems": 1}, "prompt": NULL},
            "required": ["messages"],
        },
        {"properties": {"messages": NULL, "prompt": prompt}, "required": ["prompt"]},
    )


class MessagesOrPrompt(ConversationFields):
    """A chat's conversation, or the prompt of a text completion. Subclasses declare its type."""

    messages: list[ChatMessage] = Field(
        default_factory=list, max_length=MAX_MESSAGES, fail_fast=True
    )
    prompt: object = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if bool(self.messages) == (self.prompt is not None):
            raise PydanticCustomError("prompt", "give either messages or prompt")
        return self
