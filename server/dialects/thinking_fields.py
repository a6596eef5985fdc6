"""The fields by which clients switch thinking, set its effort and bound it, under every name that
APIs have for them. All dialects take all of them, by one rule.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar, cast, get_args

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from server.errors import UNSUPPORTED, InvalidField
from server.generation.conversation import PlainValue, ReasoningEffort
from server.json_model import RequestModel, at_most, refused

NO_EFFORT = "none"
NO_BUDGET = -1

MAX_TEMPLATE_ARGUMENTS = 64

ValueT = TypeVar("ValueT")


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

TemplateArguments = Annotated[
    dict[str, PlainValue], BeforeValidator(_none_reserved), at_most(MAX_TEMPLATE_ARGUMENTS)
]


@dataclass(frozen=True, slots=True)
class ThinkingChoice:
    """What a request says about thinking. None: nothing."""

    enabled: bool | None
    effort: ReasoningEffort | None
    template: Mapping[str, PlainValue]  # `chat_template_kwargs`
    budget: int | None
    budget_field: str  # that has the budget, for errors
    is_budget_required: bool  # False: a model that does not reason keeps to it anyway

    @property
    def conversation_fields(self) -> dict[str, Any]:
        """The fields of a Conversation that tell the template."""
        return {
            "thinks": self.enabled,
            "reasoning_effort": self.effort,
            "chat_template_kwargs": self.template,
        }

    def budget_of(self, *, reasons: bool) -> int | None:
        """The budget for a model that `reasons` in a known format, or does not. Raises ApiError
        (400) where the request needs one that does.
        """
        if self.budget is None or reasons:
            return self.budget
        if self.is_budget_required:
            message = "this model has no reasoning that is known"
            raise InvalidField(self.budget_field, message, UNSUPPORTED)
        return None


class ThinkingParam(RequestModel):
    """Anthropic's `thinking`, which Z.ai and DeepSeek have as well. `adaptive`, `auto` and
    `between_tools` leave it to the model's template, as saying nothing does.
    """

    type: Literal["enabled", "disabled", "adaptive", "auto", "between_tools"]
    budget_tokens: int | None = Field(None, ge=0)


def _as_object(value: object) -> object:
    if isinstance(value, bool):
        return {"type": "enabled" if value else "disabled"}
    return value


_Thinking = Annotated[
    ThinkingParam, BeforeValidator(_as_object, json_schema_input_type=bool | ThinkingParam)
]


def _think(value: object) -> object:
    if isinstance(value, bool) or (isinstance(value, str) and value in get_args(ReasoningEffort)):
        return value
    efforts = ", ".join(map(repr, get_args(ReasoningEffort)))
    raise PydanticCustomError(
        "think", "must be true, false or one of {efforts}", {"efforts": efforts}
    )


class ReasoningParam(RequestModel):
    """OpenAI's `reasoning`, and that of OpenRouter, which has a switch and a budget in it."""

    effort: ReasoningEffort | None = None
    enabled: bool | None = None
    max_tokens: int | None = Field(None, ge=0)
    exclude: Annotated[bool, refused()] = False


Budget = Annotated[int, Field(ge=NO_BUDGET, description="-1: no limit.")]


class ThinkingFields(RequestModel):
    """All names of the switch, the effort and the budget. Two that contradict are refused."""

    reasoning_effort: ReasoningEffort | None = None
    enable_thinking: bool | None = Field(None, description="Qwen's switch, as SGLang has it.")
    thinking: _Thinking | None = None
    think: Annotated[bool | ReasoningEffort, BeforeValidator(_think)] | None = Field(
        None, description="Ollama's switch and effort."
    )
    reasoning: ReasoningParam = Field(default_factory=ReasoningParam)
    thinking_budget: int | None = Field(None, ge=0)
    thinking_token_budget: Budget | None = Field(None, description="vLLM's `thinking_budget`.")
    thinking_budget_tokens: Budget | None = Field(None, description="llama.cpp's.")
    reasoning_budget_tokens: Budget | None = Field(None, description="llama.cpp's.")
    chat_template_kwargs: TemplateArguments = Field(default_factory=dict)

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        self.thinking_choice  # noqa: B018
        return self

    @property
    def thinking_choice(self) -> ThinkingChoice:
        """What the fields say together."""
        effort: ReasoningEffort | None
        _, effort = _agreed(self._efforts())
        _, enabled = _agreed(self._switches())
        budget_field, budget = _agreed(self._budgets())
        if enabled is None and effort is not None:
            enabled = True  # who asks for an effort asks for thinking
        return ThinkingChoice(
            enabled,
            effort,
            self.chat_template_kwargs,
            budget,
            budget_field,
            budget_field not in {"thinking.budget_tokens", "reasoning.max_tokens"},
        )

    def _efforts(self) -> Iterator[tuple[str, ReasoningEffort | None]]:
        """The efforts, and the fields that they come from. A dialect adds its own field."""
        yield "reasoning_effort", self.reasoning_effort
        yield "reasoning.effort", self.reasoning.effort
        yield "think", None if isinstance(self.think, bool) else self.think
        effort = self.chat_template_kwargs.get("reasoning_effort")
        if effort in get_args(ReasoningEffort):
            yield "chat_template_kwargs.reasoning_effort", cast(ReasoningEffort, effort)

    def _switches(self) -> Iterator[tuple[str, bool | None]]:
        for name, effort in self._efforts():
            yield name, False if effort == NO_EFFORT else None
        yield "enable_thinking", self.enable_thinking
        kind = None if self.thinking is None else self.thinking.type
        yield "thinking", {"enabled": True, "disabled": False}.get(kind or "")
        yield "think", self.think if isinstance(self.think, bool) else None
        yield "reasoning.enabled", self.reasoning.enabled
        for name in ("enable_thinking", "thinking"):
            switch = self.chat_template_kwargs.get(name)
            yield f"chat_template_kwargs.{name}", switch if isinstance(switch, bool) else None

    def _budgets(self) -> Iterator[tuple[str, int | None]]:
        yield "thinking_budget", self.thinking_budget
        yield "thinking_token_budget", _limit(self.thinking_token_budget)
        yield "thinking_budget_tokens", _limit(self.thinking_budget_tokens)
        yield "reasoning_budget_tokens", _limit(self.reasoning_budget_tokens)
        if self.thinking is not None and self.thinking.type != "disabled":
            yield "thinking.budget_tokens", self.thinking.budget_tokens
        yield "reasoning.max_tokens", self.reasoning.max_tokens


def _limit(budget: int | None) -> int | None:
    return None if budget == NO_BUDGET else budget


def _agreed(named: Iterator[tuple[str, ValueT | None]]) -> tuple[str, ValueT | None]:
    """The first of the values, and its name. Raises PydanticCustomError where another differs."""
    given = [(name, value) for name, value in named if value is not None]
    if not given:
        return "", None
    first, value = given[0]
    for name, other in given[1:]:
        if other != value:
            message = "{name} contradicts {first}"
            raise PydanticCustomError("thinking", message, {"name": name, "first": first})
    return first, value
