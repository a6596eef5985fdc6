"""Common parts of OpenAI's dialects: usage, chunks, log-probabilities, a chat's conversation."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Annotated, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError, to_json
from typing_extensions import TypedDict

from engine.values.model import Tokenizer
from engine.values.output import FinishReason, TokenLogprob
from server.dialects.error_shapes import openai_error
from server.dialects.job import StreamWriter, wire_json
from server.dialects.openai_messages import ChatMessage, chat_history
from server.dialects.openai_tools import (
    ChatFunctionTool,
    ChatTool,
    ChatToolChoice,
    FunctionChoice,
    FunctionDeclaration,
    NamedFunction,
    chosen,
    dropped_kinds,
    served_tools,
)
from server.dialects.thinking_fields import ThinkingFields
from server.errors import SERVER, ApiError
from server.generation import conversation
from server.generation.choice import AnswerUsage
from server.generation.conversation import (
    MAX_MESSAGES,
    Conversation,
    check_choice,
    check_continued,
    check_messages,
    check_tools,
)
from server.generation.foreign_fields import Unsupported
from server.generation.foreign_history import log_dropped, log_foreign
from server.generation.request_fields import ModelsTemplate, PromptRequest
from server.generation.requests import ServedModel
from server.generation.tools import (
    MAX_TOOLS,
    ToolChoice,
)
from server.http.stream import EVENT_STREAM, KEEP_ALIVE, escape_line_ends, sse_data
from server.json_model import NULL, any_of


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
        calls = chain.from_iterable(turn.foreign for turn in self.messages)
        log_foreign(Counter(call.kind for call in calls), request_id)
        log_dropped(dropped_kinds(self.tools), request_id)


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

    def __init__(self, empty: Mapping[str, object], *, include_usage: bool) -> None:
        self._empty = empty
        self._include_usage = include_usage
        self._head, self._tail = sse_data(to_json(empty)).split(_NO_CHOICES)

    def chunk(self, choice: bytes) -> bytes:
        """The event of a chunk with this choice, as JSON."""
        return b'%b"choices":[%b]%b' % (self._head, escape_line_ends(choice), self._tail)

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


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobBody(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(TypedDict):
    content: list[TokenLogprobBody]
    refusal: None


LOWEST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON lacks


def token_text(token: bytes) -> str:
    r"""The token as text; one that holds half a character as `bytes:\xe2\x82`, as OpenAI does."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> list[TokenLogprobBody]:
    """The log-probabilities of each of the tokens."""
    return [
        {
            **_named(entry.token_id, entry.logprob, tokenizer),
            "top_logprobs": [
                _named(token_id, logprob, tokenizer) for token_id, logprob in entry.top
            ],
        }
        for entry in entries
    ]


def _named(token_id: int, logprob: float, tokenizer: Tokenizer) -> TopLogprob:
    token = tokenizer.token_bytes(token_id)
    return {
        "token": token_text(token),
        "logprob": max(logprob, LOWEST_LOGPROB),
        "bytes": list(token),
    }


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
