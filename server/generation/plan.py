"""The plan of a request's answers: how their text is parsed, and which grammar constrains it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.values.model import Replay, Tokenizer
from engine.values.request import Constraint, ThinkingBudget
from server.errors import UNSUPPORTED, InvalidField
from server.generation.chat import Chat, Structure
from server.generation.constraints import ConstraintWriter, answer_constraint
from server.generation.conversation import Conversation
from server.generation.thinking import Thinking
from server.generation.tools import chosen_names
from server.parsing.answer import AnswerFormat
from server.parsing.calls import Calls, NewId, openai_id
from server.parsing.lark import Function
from server.parsing.reader import Reader
from server.parsing.registry import (
    answer_format,
    chosen,
    detect,
    reasoning_format,
    tool_format,
)
from server.parsing.stream import AnswerStream
from server.parsing.typed_values import check_work
from server.settings.conversation import ConversationSettings

TAIL_TOKENS = 64
"""The prompt's last tokens: enough for what a template writes to begin the assistant's turn."""


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How one request's answers are constrained, and how they are parsed."""

    format: AnswerFormat
    functions: Mapping[str, Mapping[str, Any]]  # name to the schema of its parameters
    new_id: NewId
    skip_special_tokens: bool
    constraint: Constraint | None
    thinking_budget: ThinkingBudget | None
    opened: str  # the beginning of reasoning with which the prompt ends
    reasoning_end: str  # the marker; "" where the model has none

    def stream(self) -> AnswerStream:
        """A parser for the text of one answer."""
        reader = Reader()
        calls = Calls(self.functions, self.new_id)
        return AnswerStream(reader, self.format.read(reader, calls))

    def replay(self, tokens: Sequence[int], text: str, reasoning: str) -> Replay:
        """The tokens of an answer, for when a client sends it back."""
        before, end, _ = text.partition(self.reasoning_end) if reasoning else ("", "", "")
        return Replay(tuple(tokens), self.opened, before + end, reasoning)


class AnswerPlanner:
    """Knows the formats of the served model, as the settings name them or its template tells."""

    def __init__(self, tokenizer: Tokenizer, settings: ConversationSettings) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        found = detect(tokenizer.chat_template, tokenizer.added_tokens)
        self._names = chosen(settings.tool_parser, settings.reasoning_parser, found)
        self._tools = tool_format(self._names.tools) if self._names.tools else None
        self._reasoning = reasoning_format(self._names.reasoning) if self._names.reasoning else None

    @property
    def reasons(self) -> bool:
        """Whether the model has a known reasoning format."""
        return self._reasoning is not None

    @property
    def calls(self) -> bool:
        """Whether the model has a known format of tool calls."""
        return self._tools is not None

    def plan(self, chat: Chat, prompt: Sequence[int]) -> AnswerPlan:
        """Raises ApiError (400) for what the model has no format for."""
        functions = _functions(chat.conversation)
        if functions and self._tools is None:
            message = "no format of tool calls is known for this model (tool_parser)"
            raise InvalidField(chat.tools_field, message, UNSUPPORTED)
        try:
            check_work(function.parameters for function in functions)
        except ValueError as error:
            raise InvalidField(chat.tools_field, str(error)) from error
        tail = self._tokenizer.decode(prompt[-TAIL_TOKENS:])
        thinking = Thinking(self._tokenizer, self._reasoning, tail)
        writer = ConstraintWriter(self._tokenizer, self._tools, thinking, self._settings)
        return AnswerPlan(
            format=answer_format(
                self._names.tools,
                self._names.reasoning,
                is_open=thinking.is_open,
                with_tools=bool(functions),
            ),
            functions={function.name: function.parameters for function in functions},
            new_id=self._tools.new_id if self._tools else openai_id,
            skip_special_tokens=not self._has_special_markers(functions),
            constraint=writer.constraint(chat, functions),
            thinking_budget=thinking.budget(chat.thinking_budget),
            opened=thinking.opened,
            reasoning_end=self._reasoning.end if self._reasoning else "",
        )

    def text_constraint(self, structure: Structure | None) -> Constraint | None:
        """The constraint of a text completion, if it must be anything."""
        return answer_constraint(structure, self._settings)

    def _has_special_markers(self, functions: Sequence[Function]) -> bool:
        markers = [*self._tools.begins] if self._tools and functions else []
        if self._reasoning:
            markers += [self._reasoning.begin, self._reasoning.end]
        special = self._tokenizer.special_tokens
        return any(token in marker for marker in markers for token in special)


def _functions(conversation: Conversation) -> list[Function]:
    """The functions that may be called."""
    choice = conversation.tool_choice
    if choice == "none":
        return []
    names = chosen_names(choice)
    return [
        Function(function.name, function.parameters or {}, function.strict)
        for function in (tool.function for tool in conversation.tools)
        if names is None or function.name in names
    ]
