"""The plan of a request's answers: how their text is parsed, and which grammar constrains it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.types.model import Replay, Tokenizer
from engine.types.request import (
    Alternative,
    Constraint,
    Grammar,
    GrammarKind,
    ThinkingBlock,
    ThinkingBudget,
)
from server.errors import invalid
from server.parsing.answer import AnswerFormat, ReasoningFormat, ToolFormat
from server.parsing.calls import Calls, NewId, openai_id
from server.parsing.lark import Function, NotASchema, calls_grammar
from server.parsing.reader import Reader
from server.parsing.registry import (
    answer_format,
    chosen,
    detect,
    reasoning_format,
    tool_format,
)
from server.parsing.stream import AnswerStream
from server.schemas.chat import ChatRequest
from server.schemas.common import GenerationRequest
from server.schemas.errors import UNSUPPORTED
from server.schemas.tools import chosen_names, must_call

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
    """Knows the formats of the served model. `tool_parser` and `reasoning_parser` are names of
    formats, or `auto`, or `none`.
    """

    def __init__(self, tokenizer: Tokenizer, tool_parser: str, reasoning_parser: str) -> None:
        self._tokenizer = tokenizer
        found = detect(tokenizer.chat_template, tokenizer.added_tokens)
        self._names = chosen(tool_parser, reasoning_parser, found)
        self._tools = tool_format(self._names.tools) if self._names.tools else None
        self._reasoning = reasoning_format(self._names.reasoning) if self._names.reasoning else None

    @property
    def reasons(self) -> bool:
        """Whether the model has a known reasoning format."""
        return self._reasoning is not None

    def plan(self, body: ChatRequest, prompt: Sequence[int]) -> AnswerPlan:
        """Raises ApiError (400) for what the model has no format for."""
        functions = _functions(body)
        if functions and self._tools is None:
            message = "no format of tool calls is known for this model (tool_parser)"
            raise invalid(f"{body.tools_field}: {message}", body.tools_field, UNSUPPORTED)
        tail = self._tokenizer.decode(prompt[-TAIL_TOKENS:])
        thinking = _Thinking(self._tokenizer, self._reasoning, tail)
        writer = _Writer(self._tokenizer, self._tools, thinking)
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
            constraint=writer.constraint(body, functions),
            thinking_budget=thinking.budget(body.thinking_budget),
            opened=thinking.opened,
            reasoning_end=self._reasoning.end if self._reasoning else "",
        )

    def _has_special_markers(self, functions: Sequence[Function]) -> bool:
        markers = [*self._tools.begins] if self._tools and functions else []
        if self._reasoning:
            markers += [self._reasoning.begin, self._reasoning.end]
        special = self._tokenizer.special_tokens
        return any(token in marker for marker in markers for token in special)


def text_constraint(body: GenerationRequest) -> Constraint | None:
    """The constraint of a text completion, if the request has one."""
    if body.structure is None:
        return None
    param, grammar = body.structure
    return Constraint(grammar, param)


def _functions(body: ChatRequest) -> list[Function]:
    """The functions that may be called."""
    choice = body.offered_choice
    if choice == "none":
        return []
    names = chosen_names(choice)
    return [
        Function(function.name, function.parameters or {}, function.strict)
        for function in (tool.function for tool in body.offered_tools)
        if names is None or function.name in names
    ]


class _Thinking:
    """Whether reasoning is open, over or yet to begin at the end of the prompt, its `tail`."""

    def __init__(self, tokenizer: Tokenizer, format: ReasoningFormat | None, tail: str) -> None:
        self._tokenizer = tokenizer
        self._format = format
        self.is_open = format is not None and tail.rstrip().endswith(format.begin)
        self._is_over = format is None or tail.rstrip().endswith(format.end)
        self.opened = ""
        if format is not None and self.is_open:
            self.opened = tail[tail.rfind(format.begin) :]

    def before_calls(self, calls: str) -> ThinkingBlock | None:
        """The reasoning that may precede calls that begin with this text; None where none may."""
        if self._format is None:
            return None
        block = self._block(self._format.end)
        if block is not None and block.begin[:1] == self._tokens(calls)[:1]:
            return None  # its first token would not tell the one from the other
        return block

    def before_content(self) -> ThinkingBlock | None:
        """The block that may precede content: up to the marker of content, or else of the end of
        reasoning."""
        return self._block(self._format.content or self._format.end) if self._format else None

    def _block(self, end: str) -> ThinkingBlock | None:
        if self._format is None or self._is_over:
            return None
        begin = "" if self.is_open else self._format.begin
        return ThinkingBlock(self._tokens(begin), self._tokens(end), self._space)

    @property
    def _space(self) -> tuple[int, ...]:
        """The line breaks after reasoning that models write and no client is sent, of one token. A
        grammar without them would force the model into text that it never writes."""
        if self._format is None or self._format.content:
            return ()
        lines = (self._tokens("\n"), self._tokens("\n\n"))
        return tuple(tokens[0] for tokens in lines if len(tokens) == 1)

    def budget(self, tokens: int | None) -> ThinkingBudget | None:
        """Raises ApiError (400) for a model that does not reason."""
        if tokens is None:
            return None
        if self._format is None:
            message = "thinking_budget: this model has no reasoning that is known"
            raise invalid(message, "thinking_budget", UNSUPPORTED)
        start = () if self.is_open else self._tokens(self._format.begin)
        end = self._tokens(self._format.end)
        return None if self._is_over else ThinkingBudget(tokens, start, end)

    def _tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


class _Writer:
    """Makes the grammar of what a request requires."""

    def __init__(self, tokenizer: Tokenizer, tools: ToolFormat | None, thinking: _Thinking) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._thinking = thinking

    def constraint(self, body: ChatRequest, functions: Sequence[Function]) -> Constraint | None:
        tools = self._tools if functions else None
        if tools is not None and must_call(body.offered_choice):
            begin = tools.syntax.opens + tools.syntax.begin
            grammar = self._calls(tools, functions, many=body.allows_parallel_calls)
            return Constraint(grammar, "tools", thinking=self._thinking.before_calls(begin))
        marker = self._marker(tools) if tools is not None else ""
        calls = self._once_begun(tools, marker, body, functions) if tools and marker else None
        if body.structure is None:
            return calls
        param, grammar = body.structure
        instead = Alternative(self._tokenizer.added_tokens[marker], calls) if marker else None
        return Constraint(grammar, param, thinking=self._thinking.before_content(), instead=instead)

    def _marker(self, tools: ToolFormat) -> str:
        """The marker that begins calls, if it is one added token: only that differs from text."""
        return next((m for m in tools.begins if m in self._tokenizer.added_tokens), "")

    def _once_begun(
        self, tools: ToolFormat, marker: str, body: ChatRequest, functions: Sequence[Function]
    ) -> Constraint | None:
        """The constraint on calls that the model chooses to make; None where all are allowed."""
        parallel = body.allows_parallel_calls
        matters = not parallel or any(function.strict for function in functions)
        matters |= len(functions) < len(body.offered_tools)
        if not matters:
            return None
        return Constraint(
            self._calls(tools, functions, many=False, behind=marker),
            "tools",
            behind=(self._tokenizer.added_tokens[marker],),
            repeats=parallel,
        )

    def _calls(
        self, tools: ToolFormat, functions: Sequence[Function], *, many: bool, behind: str = ""
    ) -> Grammar:
        tokens = self._tokenizer.added_tokens
        try:
            text = calls_grammar(tools.syntax, functions, tokens, many=many, behind=behind)
        except NotASchema as error:
            raise invalid(f"tools: {error}", "tools") from error
        return Grammar(GrammarKind.LARK, text)
