"""`POST /v1/chat/completions`."""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue, SkipJsonSchema
from pydantic_core import PydanticCustomError

from server.schemas.base import RequestModel, SparseModel
from server.schemas.common import (
    GenerationRequest,
    PromptRequest,
    TokenLimit,
    UsageBody,
)
from server.schemas.errors import UNSUPPORTED
from server.schemas.tools import (
    MAX_TOOLS,
    ChatFunctionTool,
    CustomToolCall,
    FunctionCall,
    FunctionChoice,
    FunctionDeclaration,
    FunctionToolCall,
    NamedFunction,
    NamedToolChoice,
    ToolCalls,
    ToolChoice,
    Tools,
    chosen_names,
)

MAX_MESSAGES = 10_000
MAX_PARTS = 1000
MAX_TEMPLATE_ARGUMENTS = 64
MAX_MODALITIES = 16


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
"""Roles whose content may be null: beside calls, or where a function gave nothing back."""

FUNCTION_CALL_ID = "function1"
"""The id of a `function_call`, which has none: its result follows it. Mistral's templates take nine
letters and digits."""

CONTENT_UNLESS_NEEDLESS: JsonSchemaValue = {
    "anyOf": [
        {"properties": {"role": {"enum": list(NEEDS_NO_CONTENT)}}},
        {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]},
    ]
}


class Message(RequestModel):
    model_config = ConfigDict(json_schema_extra=CONTENT_UNLESS_NEEDLESS)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    refusal: str | None = None  # before content, which it becomes a part of
    content: Content | None = Field(None, validate_default=True)
    name: str | None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None  # what was there before tool_calls
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, as some clients spell it

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
    def _content_unless_needless(self) -> Self:
        if self.content is None and self.role not in NEEDS_NO_CONTENT:
            message = "a message of role '{role}' needs content"
            raise PydanticCustomError("content", message, {"role": self.role})
        return self

    @property
    def is_open(self) -> bool:
        """Whether it is an answer that can be continued."""
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


def _plain(arguments: object) -> object:
    """Few, and none that the server gives itself."""
    if not isinstance(arguments, dict):
        raise PydanticCustomError("template", "must be an object")
    if len(arguments) > MAX_TEMPLATE_ARGUMENTS:
        message = "at most {limit} entries"
        raise PydanticCustomError("template", message, {"limit": MAX_TEMPLATE_ARGUMENTS})
    if reserved := sorted(OWN_TEMPLATE_ARGUMENTS & arguments.keys()):
        raise PydanticCustomError("template", "{name} cannot be set here", {"name": reserved[0]})
    return arguments


OWN_TEMPLATE_ARGUMENTS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
     "tokenize", "chat_template", "replays", "return_dict", "conversation"}
)  # fmt: skip
PlainValue = str | int | float | bool | None
TemplateArguments = Annotated[dict[str, PlainValue], BeforeValidator(_plain)]


class Conversation(PromptRequest):
    """All that a prompt is made of, in every dialect. A value: who makes one gets the errors."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    tools: Tools = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    reasoning_effort: str | None = Field(None, max_length=32)
    chat_template_kwargs: TemplateArguments = Field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

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
        if value and messages and not messages[-1].is_open:
            message = "the last message must be the assistant's, with text and without calls"
            raise PydanticCustomError("continue_final_message", message)
        return value


class ChatConversation(Conversation):
    """What a chat body has of it. What vLLM has beyond it is refused, as it would be another
    prompt.
    """

    functions: Annotated[list[FunctionDeclaration], Field(max_length=MAX_TOOLS, fail_fast=True)] = (
        Field(default_factory=list, description="What was there before tools.")
    )
    function_call: FunctionChoice = Field("auto", description="The same of tool_choice.")
    chat_template: SkipJsonSchema[str] = ""

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

    @field_validator("chat_template")
    @classmethod
    def _models_own_template(cls, value: str) -> str:
        if value:
            raise PydanticCustomError(UNSUPPORTED, "the model's own is the only one")
        return value

    @property
    def conversation(self) -> Conversation:
        """The value: `functions` are tools like any others."""
        if not self.functions:
            return self
        tools = [ChatFunctionTool(type="function", function=each) for each in self.functions]
        choice: ToolChoice
        if isinstance(self.function_call, NamedFunction):
            choice = NamedToolChoice(type="function", function=self.function_call)
        else:
            choice = self.function_call
        return self.model_copy(update={"tools": tools, "tool_choice": choice})


class Prediction(RequestModel):
    """What the answer is expected to be like, such as a file that it will repeat with changes."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


Modality = Annotated[str, Field(json_schema_extra={"const": "text"})]


class ChatRequest(ChatConversation, GenerationRequest):
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    parallel_tool_calls: bool = True
    thinking_budget: int | None = Field(None, ge=0)
    service_tier: str | None = Field(
        None,
        max_length=64,
        description="There is one tier: an answer that names it says `default`.",
    )
    prediction: Prediction | None = Field(
        None,
        description="Tokens are drafted from it wherever the answer goes on as it does; the answer "
        "is the same.",
    )
    modalities: list[Modality] = Field(
        default_factory=list, max_length=MAX_MODALITIES, fail_fast=True
    )

    @field_validator("max_tokens", "max_completion_tokens")
    @classmethod
    def _some_tokens(cls, value: int | None) -> int | None:
        if value == 0:
            raise PydanticCustomError("token_limit", "must be at least 1, or -1 for no limit")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise PydanticCustomError("top_logprobs", "only allowed when logprobs is true")
        return value

    @field_validator("modalities")
    @classmethod
    def _text_output_alone(cls, modalities: list[str]) -> list[str]:
        if any(modality != "text" for modality in modalities):
            raise PydanticCustomError(UNSUPPORTED, "only 'text' is supported")
        return modalities


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobBody(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(BaseModel):
    content: list[TokenLogprobBody]
    refusal: None


class CalledFunction(BaseModel):
    name: str
    arguments: str  # JSON


class ToolCallBody(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class CalledCustomTool(BaseModel):
    name: str
    input: str


class CustomToolCallBody(BaseModel):
    id: str
    type: Literal["custom"]
    custom: CalledCustomTool


class AssistantMessage(SparseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallBody | CustomToolCallBody] | None = None
    function_call: CalledFunction | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same: clients read one or the other


ServedTier = Literal["default"]
"""OpenAI's tiers of service differ in price and speed. There is one here."""

ChatFinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: ChatFinishReason


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageBody
    service_tier: ServedTier | None = None  # where the request names one


class FunctionDelta(SparseModel):
    """The name comes first, whole, then slices of the arguments."""

    name: str | None = None
    arguments: str


class ToolCallDelta(SparseModel):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class CustomDelta(SparseModel):
    """The name comes first, then the input, whole."""

    name: str | None = None
    input: str


class CustomToolCallDelta(SparseModel):
    index: int
    id: str | None = None
    type: Literal["custom"] | None = None
    custom: CustomDelta


class Delta(SparseModel):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    tool_calls: list[ToolCallDelta | CustomToolCallDelta] | None = None
    function_call: FunctionDelta | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None
    finish_reason: ChatFinishReason | None


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    service_tier: ServedTier | None = None  # where the request names one
    usage: UsageBody | None = None  # set, to null or not, only with include_usage
