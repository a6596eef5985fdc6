"""A conversation, and how it is to be answered. Every dialect reads its bodies into these."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from server.errors import UNSUPPORTED, invalid_field
from server.generation.request_fields import PromptRequest, SampledRequest, Structure
from server.generation.tools import (
    ChatTool,
    CustomToolCall,
    FunctionCall,
    FunctionToolCall,
    ToolCalls,
    ToolChoice,
    Tools,
    chosen_names,
)
from server.json_model import RequestModel, any_of, at_most, present
from server.json_size import check_json_size

MAX_MESSAGES = 10_000
MAX_PARTS = 1000
MAX_TEMPLATE_ARGUMENTS = 64


class TextPart(RequestModel):
    """One part of a message's content. Text is the only kind that is served."""

    type: str = Field(json_schema_extra={"const": "text"})
    text: str

    @field_validator("type")
    @classmethod
    def _text_alone(cls, kind: str) -> str:
        if kind != "text":
            message = "parts of type '{kind}' are not supported, only 'text'"
            raise PydanticCustomError(UNSUPPORTED, message, {"kind": kind[:64]})
        return kind


def _text(text: object) -> dict[str, object]:
    return {"type": "text", "text": text}


def as_parts(content: object) -> object:
    """A string as one part of text."""
    if isinstance(content, str):
        return [_text(content)]
    if not isinstance(content, list):
        raise PydanticCustomError("content", "must be a string or a list of parts")
    return content


TextParts = Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]
Content = Annotated[TextParts, BeforeValidator(as_parts, json_schema_input_type=str | TextParts)]


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

    @property
    def is_prefill(self) -> bool:
        """Whether it is the beginning of an answer, which the model can continue."""
        return self.role == "assistant" and bool(self.content) and not self.calls

    @property
    def calls(self) -> Sequence[FunctionToolCall | CustomToolCall]:
        """The calls of an assistant; a `function_call` as one."""
        if self.tool_calls or self.function_call is None:
            return self.tool_calls or ()
        return [FunctionToolCall(id=FUNCTION_CALL_ID, function=self.function_call)]

    @property
    def answered_call(self) -> str | None:
        """The id of the call whose result it is."""
        return self.tool_call_id or (FUNCTION_CALL_ID if self.role == "function" else None)


def _none_reserved(arguments: object) -> object:
    """Refuse arguments that the server sets itself."""
    if not isinstance(arguments, dict):
        raise PydanticCustomError("template", "must be an object")
    if reserved := sorted(OWN_TEMPLATE_ARGUMENTS & arguments.keys()):
        raise PydanticCustomError("template", "{name} cannot be set here", {"name": reserved[0]})
    return arguments


OWN_TEMPLATE_ARGUMENTS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
     "tokenize", "chat_template", "replays", "return_dict", "conversation"}
)  # fmt: skip
PlainValue = str | int | float | bool | None
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""Of OpenAI's API, and `max`, which others have. `chat_template_kwargs` may have any other text."""

TemplateArguments = Annotated[
    dict[str, PlainValue], BeforeValidator(_none_reserved), at_most(MAX_TEMPLATE_ARGUMENTS)
]


class Conversation(PromptRequest):
    """The fields that make a prompt, in every dialect. Construction validates them."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    tools: Tools = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: TemplateArguments = Field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @classmethod
    def read(cls, **fields: object) -> Self:
        """The conversation that a dialect makes of its own body. Raises ApiError (400)."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise invalid_field(error) from None

    @field_validator("messages")
    @classmethod
    def _readable_arguments(cls, messages: list[Message]) -> list[Message]:
        """The arguments of calls are JSON that templates take as objects: they count as the JSON of
        a body does.
        """
        arguments = [call.function.arguments for message in messages for call in message.calls]
        try:
            if arguments:
                check_json_size(*(text.encode("utf-8", "surrogatepass") for text in arguments))
        except ValueError as error:
            message = "what the arguments of all calls say {problem}"
            raise PydanticCustomError("arguments", message, {"problem": str(error)}) from None
        return messages

    @field_validator("tools")
    @classmethod
    def _told_apart(cls, tools: Tools) -> Tools:
        """A call says no more than a name. The same tool may be declared twice."""
        known = dict[str, ChatTool]()
        for tool in tools:
            if known.setdefault(tool.function.name, tool) != tool:
                message = "two tools have the name '{name}'"
                raise PydanticCustomError("tools", message, {"name": tool.function.name})
        return tools

    @field_validator("tool_choice")
    @classmethod
    def _choosable(cls, choice: ToolChoice, info: ValidationInfo) -> ToolChoice:
        names = {tool.function.name for tool in info.data.get("tools", ())}
        if choice == "required" and not names:
            raise PydanticCustomError("tool_choice", "there are no tools to choose from")
        for name in chosen_names(choice) or ():
            if name not in names:
                message = "tools has no function '{name}'"
                raise PydanticCustomError("tool_choice", message, {"name": name})
        return choice

    @field_validator("continue_final_message")
    @classmethod
    def _continuable(cls, value: bool, info: ValidationInfo) -> bool:
        messages = info.data.get("messages")
        if value and messages and not messages[-1].is_prefill:
            message = "the last message must be the assistant's, with text and without calls"
            raise PydanticCustomError("continue_final_message", message)
        return value


def digests(messages: Iterable[Message]) -> Iterator[bytes]:
    """For each message a digest of those before it; then the digest of all.

    It has what a client sends back as it was: the texts and the calls of users, tools and
    assistants. Instructions, which some clients write anew for each turn, are left out.
    """
    found = blake2b(digest_size=16)
    for message in messages:
        yield found.digest()
        if message.role not in ("system", "developer"):
            said = "\n".join(part.text for part in message.content or ()).strip()
            calls = [f"{call.id} {call.function.name}" for call in message.calls]
            found.update(repr((message.role, said, calls)).encode())
    yield found.digest()


def digest_of(messages: Iterable[Message]) -> bytes:
    """The digest of all these messages."""
    *_, last = digests(messages)
    return last


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation, and how it is to be answered. Each dialect reads its bodies into one."""

    conversation: Conversation
    sampling: SampledRequest
    max_tokens: int | None = None  # None and -1: as many as there is room for
    n: int = 1
    logprobs: int | None = None  # how many alternatives of each token; None: no logprobs
    structure: Structure | None = None
    parallel_calls: bool = True
    thinking_budget: int | None = None
    prediction: str = ""  # what the answer is expected to be like
    tools_field: str = "tools"  # from which they come, for errors
