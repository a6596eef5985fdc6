"""A body that has a prompt or a chat, and its prompt tokens. Nothing is generated from it."""

from typing import Annotated, ClassVar, Self

from pydantic import (
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue, SkipJsonSchema
from pydantic_core import PydanticCustomError

from server.errors import UNSUPPORTED
from server.generation.conversation import MAX_MESSAGES, Conversation, Message
from server.generation.models import ServedModel
from server.generation.request_fields import Prompt, Unsupported, WirePrompt, parse_prompts
from server.generation.requests import chat_tokens
from server.generation.tools import (
    MAX_TOOLS,
    ChatFunctionTool,
    FunctionChoice,
    FunctionDeclaration,
    NamedFunction,
    NamedToolChoice,
    ToolChoice,
)
from server.json_model import NULL
from server.record import RequestRecord


class ChatConversation(Conversation):
    """What a chat body has of it. What vLLM has beyond it is refused, as it would be another
    prompt.
    """

    functions: Annotated[list[FunctionDeclaration], Field(max_length=MAX_TOOLS, fail_fast=True)] = (
        Field(default_factory=list, description="What was there before tools.")
    )
    function_call: FunctionChoice = Field("auto", description="The same of tool_choice.")
    chat_template: SkipJsonSchema[str] = ""
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


def _parse_prompt(value: object) -> Prompt:
    prompts = parse_prompts(value)
    if len(prompts) != 1:
        raise PydanticCustomError("prompt", "one prompt at a time")
    return prompts[0]


WireOnePrompt = WirePrompt | Annotated[list[WirePrompt], Field(min_length=1, max_length=1)]
OnePrompt = Annotated[Prompt, PlainValidator(_parse_prompt, json_schema_input_type=WireOnePrompt)]


ONE_OF_BOTH: JsonSchemaValue = {
    "anyOf": [
        {
            "properties": {"messages": {"type": "array", "minItems": 1}, "prompt": NULL},
            "required": ["messages"],
        },
        {
            "properties": {"messages": NULL, "prompt": {"type": ["string", "array"]}},
            "required": ["prompt"],
        },
    ]
}


class PromptOrChat(ChatConversation):
    """A prompt as text or token ids, or a chat body."""

    EXAMPLE: ClassVar = {"messages": [{"role": "user", "content": "What is a radix tree?"}]}

    model_config = ConfigDict(json_schema_extra=ONE_OF_BOTH)

    messages: list[Message] = Field(default_factory=list, max_length=MAX_MESSAGES, fail_fast=True)
    prompt: OnePrompt | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if bool(self.messages) == (self.prompt is not None):
            raise PydanticCustomError("prompt", "give either messages or prompt")
        return self


async def prompt_tokens(
    body: PromptOrChat,
    model: ServedModel,
    record: RequestRecord,
    *,
    add_special_tokens: bool = True,
) -> tuple[int, ...]:
    """The prompt of either kind of completion. `add_special_tokens` applies to plain text.

    Raises ApiError (400) for one that the model cannot take.
    """
    if body.prompt is None:
        chat = await model.workers.prepare(record, lambda: body.conversation)
        return await chat_tokens(chat, model, record)
    return await model.prompts.text(record, body.prompt, add_special_tokens=add_special_tokens)
