"""The plan of a request's answers: how their text is parsed, and which grammar constrains it."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from sys import getsizeof
from typing import Any, TypeAlias

from pydantic_core import from_json, to_json

from engine.values.model import Replay, Tokenizer
from engine.values.request import (
    Alternative,
    Constraint,
    Grammar,
    GrammarKind,
    Markup,
    ThinkingBlock,
    ThinkingBudget,
)
from server.errors import UNSUPPORTED, InvalidField
from server.generation.conversation import Chat, Conversation, digest_of
from server.generation.markers import CallMarker, marker_of
from server.generation.request_fields import Structure, of_schema
from server.parsing.answer import ReasoningFormat, ToolFormat
from server.parsing.json_schema import closed
from server.parsing.lark import CallSyntax, Function, NotASchema, calls_grammar, names_only
from server.parsing.parameters import check_work
from server.parsing.reader import AnswerStream, Calls, NewId, Reader, openai_id
from server.parsing.registry import (
    AnswerFormat,
    answer_format,
    chosen,
    detect,
    reasoning_format,
    tool_format,
)
from server.settings.models import ConversationSettings


class Thinking:
    """Whether reasoning is open, over or yet to begin at the end of the prompt, its `tail`.

    It is open behind a marker that begins it, unless its end follows: after other text, too. The
    marker is the template's where it is a control token, which no client can write, or where
    nothing but white space follows it; or it is in the beginning of an answer that the client has
    written, the `prefill`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        format: ReasoningFormat | None,
        prompt: Sequence[int],
        prefill: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._format = format
        self.opened = ""
        tail = tokenizer.decode(prompt[-TAIL_TOKENS:]) if format else ""
        self._is_over = format is None or tail.rstrip().endswith(format.end)
        if format is not None and not self._is_over:
            self.opened = self._begun(format, prompt[-MAX_OPENED_TOKENS:], tail, prefill)
        self.is_open = bool(self.opened)

    def _begun(
        self, format: ReasoningFormat, prompt: Sequence[int], tail: str, prefill: str
    ) -> str:
        """The text of the reasoning that the prompt has begun, its marker included; or ""."""
        if tail.rstrip().endswith(format.begin):
            return tail[tail.rfind(format.begin) :]
        if format.begin in prefill:
            begun = prefill[prefill.rfind(format.begin) :]
            return begun if format.end not in begun else ""
        marker = self._tokens(format.begin)
        if not set(marker) & set(self._tokenizer.added_tokens.values()):
            return ""
        starts = [at for at, token in enumerate(prompt) if token == marker[0]]
        for at in reversed(starts):
            if tuple(prompt[at : at + len(marker)]) == marker:
                begun = self._tokenizer.decode(prompt[at:])
                return begun if format.end not in begun else ""
        return ""

    def before_calls(self, calls: Sequence[int]) -> ThinkingBlock | None:
        """The reasoning that may precede calls of such a beginning; None where none may."""
        if self._format is None:
            return None
        block = self._block(self._format.end + self._format.before_calls)
        if block is not None and block.begin[:1] == tuple(calls[:1]):
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
            message = "this model has no reasoning that is known"
            raise InvalidField("thinking_budget", message, UNSUPPORTED)
        start, end = self._tokens(self._format.begin), self._tokens(self._format.end)
        return ThinkingBudget(tokens, start, end, self.is_open)

    def _tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def answer_constraint(
    structure: Structure | None, settings: ConversationSettings
) -> Constraint | None:
    """The constraint on the answer, if any. Raises ApiError (400) for a grammar that is too long,
    without parsing it.
    """
    if structure is None:
        return None
    param, grammar = structure
    if problem := grammar.too_long:
        raise InvalidField(param, problem)
    is_schema = grammar.kind is GrammarKind.JSON_SCHEMA
    return Constraint(
        _closed(grammar) if is_schema and settings.json_schemas == "closed" else grammar, param
    )


def _closed(grammar: Grammar) -> Grammar:
    """The schema with closed objects. An invalid schema is returned unchanged, also one with half a
    character, which no engine could be sent; its trial refuses it with the reason.
    """
    with suppress(ValueError, RecursionError):
        schema = json.loads(grammar.text)
        if isinstance(schema, dict):
            found = of_schema(closed(schema))
            found.text.encode()
            return found
    return grammar


WriteCalls: TypeAlias = Callable[[CallSyntax, str, bool, str], str]
"""Writes the grammar of the calls of functions, which are given as JSON; see `calls_grammar`."""

KEPT_GRAMMARS = 4
"""How many grammars of calls a model's planner keeps: an agent sends its tools with each turn, and
has two of them, with the schemas and without."""


def _written_calls(
    special_tokens: Mapping[str, int], syntax: CallSyntax, declared: str, many: bool, behind: str
) -> str:
    functions = [Function(*fields) for fields in json.loads(declared)]
    return calls_grammar(syntax, functions, special_tokens, many=many, behind=behind)


class ConstraintWriter:
    """Writes the constraints of one request's answers."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: ToolFormat | None,
        write_calls: "WriteCalls",
        marker: CallMarker | None,
        thinking: Thinking,
        settings: ConversationSettings,
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._write_calls = write_calls
        self._marker = marker
        self._thinking = thinking
        self._settings = settings

    def constraint(self, chat: Chat, functions: Sequence[Function]) -> Constraint | None:
        """Raises ApiError (400) for a tool that cannot be held to its schema, but must be."""
        tools = self._tools if functions else None
        if tools is not None and chat.conversation.tool_choice.must_call:
            begin = self._encoded(tools.syntax.opens + tools.syntax.begin)
            grammar = self._calls(tools, functions, many=chat.parallel_calls)
            if grammar.too_long:
                raise InvalidField("tools", grammar.too_long)
            return Constraint(grammar, "tools", thinking=self._thinking.before_calls(begin))
        marker = self._marker if tools is not None else None
        calls = (
            self._triggered_tool_grammar(tools, marker, chat, functions)
            if tools and marker
            else None
        )
        answer = answer_constraint(chat.structure, self._settings)
        if answer is None:
            return calls
        return replace(
            answer,
            thinking=self._thinking.before_content(),
            instead=_in_place(marker, calls) if marker else None,
        )

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _triggered_tool_grammar(
        self, tools: ToolFormat, marker: CallMarker, chat: Chat, functions: Sequence[Function]
    ) -> Constraint | None:
        """The constraint on calls that the model chooses to make; None where all are allowed."""
        parallel = chat.parallel_calls
        is_promised = not parallel or any(function.strict for function in functions)
        is_promised |= len(functions) < len(chat.conversation.known_tools)
        if not is_promised and self._settings.tool_guides == "strict-only":
            return None
        # After a marker that not every call has, other calls may follow.
        many = parallel and marker.text not in tools.syntax.begin
        grammars = self._fallback_grammars(tools, functions, many=many, behind=marker.text)
        short = [grammar for grammar in grammars if not grammar.too_long]
        if not short:
            if is_promised:
                raise InvalidField("tools", grammars[-1].too_long or "")
            return None
        first, *weaker = short
        return Constraint(
            first,
            "tools",
            thinking=self._thinking.before_calls(marker.tokens),
            behind=marker.tokens,
            repeats=parallel,
            weaker=(*weaker,) if is_promised else (*weaker, None),
            spellings=marker.spellings,
        )

    def _fallback_grammars(
        self, tools: ToolFormat, functions: Sequence[Function], *, many: bool, behind: str
    ) -> list[Grammar]:
        """Grammars for the calls: with the full schemas, and with only the names of functions that
        are not strict.
        """
        loose = [names_only(function) for function in functions]
        whole = list[Grammar]()
        with suppress(InvalidField):
            whole = [self._calls(tools, functions, many=many, behind=behind)]
        names = self._calls(tools, loose, many=many, behind=behind)
        return list(dict.fromkeys([*whole, names]))

    def _calls(
        self, tools: ToolFormat, functions: Sequence[Function], *, many: bool, behind: str = ""
    ) -> Grammar:
        """Raises ApiError (400) for parameters that are no schema."""
        declared = json.dumps([(one.name, one.parameters, one.strict) for one in functions])
        try:
            text = self._write_calls(tools.syntax, declared, many, behind)
        except NotASchema as error:
            raise InvalidField("tools", str(error)) from error
        return Grammar(GrammarKind.LARK, text)


def _in_place(marker: CallMarker, calls: Constraint | None) -> Alternative | None:
    """Calls in place of an answer, after the reasoning. None if their marker has several tokens:
    the first token decides which alternative it is.
    """
    if len(marker.tokens) > 1:
        return None
    return Alternative(marker.tokens[0], replace(calls, thinking=None) if calls else None)


def grammar_bytes(constraint: Constraint | None) -> int:
    """The memory of the grammars of a constraint."""
    if constraint is None:
        return 0
    instead = constraint.instead.constraint if constraint.instead else None
    grammars = (constraint.grammar, *filter(None, constraint.weaker))
    return sum(getsizeof(grammar.text) for grammar in grammars) + grammar_bytes(instead)


MAX_OPENED_TOKENS = 1024
"""The number of last prompt tokens in which reasoning is looked for that the template has begun."""

TAIL_TOKENS = 64
"""The number of last prompt tokens that hold the template's beginning of the assistant's turn."""


class _Schemas(Mapping[str, Mapping[str, Any]]):
    """Schemas by name, kept as JSON. One is parsed when it is looked up, and kept until another
    is.
    """

    def __init__(self, texts: Mapping[str, bytes]) -> None:
        self._texts = texts
        self._latest: tuple[str, Mapping[str, Any]] | None = None

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        if self._latest is None or self._latest[0] != name:
            self._latest = name, from_json(self._texts[name])
        return self._latest[1]

    def __contains__(self, name: object) -> bool:
        return name in self._texts

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """The constraint and the parser of one request's answers."""

    format: AnswerFormat
    functions: Mapping[str, bytes]  # name to the schema of its parameters, as JSON
    new_id: NewId
    skip_special_tokens: bool
    constraint: Constraint | None
    thinking_budget: ThinkingBudget | None
    opened: str  # the beginning of reasoning with which the prompt ends
    reasoning_end: str  # the marker; "" where the model has none
    conversation: bytes  # a digest of its messages
    forbidden: Sequence[tuple[int, ...]]  # tokens that the answer may not have in a row

    @property
    def markup(self) -> Markup:
        """What in the text is no content."""
        return self.format.markup(is_open=bool(self.opened))

    def stream(self) -> AnswerStream:
        """A parser for the text of one answer."""
        reader = Reader()
        calls = Calls(_Schemas(self.functions), self.new_id)
        return AnswerStream(reader, self.format.read(reader, calls, is_open=bool(self.opened)))

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
        names = chosen(settings.tool_parser, settings.reasoning_parser, found)
        self.tools = tool_format(names.tools) if names.tools else None
        """The format of tool calls; None for a model that calls none."""
        self._reasoning = reasoning_format(names.reasoning) if names.reasoning else None
        self._format = answer_format(names)
        self._format_without_calls = replace(self._format, tools=None)
        self._write_calls: WriteCalls = lru_cache(KEPT_GRAMMARS)(
            partial(_written_calls, tokenizer.added_tokens)
        )

    @property
    def reasons(self) -> bool:
        """Whether the model has a known reasoning format."""
        return self._reasoning is not None

    @cached_property
    def marker(self) -> CallMarker | None:
        """What begins calls, and nothing else; None where nothing does."""
        return marker_of(self.tools, self._tokenizer) if self.tools else None

    def plan(self, chat: Chat, prompt: Sequence[int]) -> AnswerPlan:
        """Raises ApiError (400) for a feature that the model has no format for."""
        tools = chat.conversation.callable_tools
        functions = [Function(tool.name, tool.parameters, tool.strict) for tool in tools]
        if functions:
            self._check_functions(functions, chat.tools_field)
        thinking = Thinking(self._tokenizer, self._reasoning, prompt, _prefill(chat.conversation))
        writer = ConstraintWriter(
            self._tokenizer,
            self.tools,
            self._write_calls,
            self.marker,
            thinking,
            self._settings,
        )
        return AnswerPlan(
            format=self._format_of(chat, functions),
            functions={function.name: to_json(function.parameters) for function in functions},
            new_id=self.tools.new_id if self.tools else openai_id,
            skip_special_tokens=not self._has_special_markers(functions),
            constraint=writer.constraint(chat, functions),
            thinking_budget=thinking.budget(chat.thinking_budget),
            opened=thinking.opened,
            reasoning_end=self._reasoning.end if self._reasoning else "",
            conversation=digest_of(chat.conversation.messages),
            forbidden=() if functions else self._forbidden(chat.conversation),
        )

    def _forbidden(self, conversation: Conversation) -> Sequence[tuple[int, ...]]:
        """What begins calls, in a conversation that has tools or calls, where none may be made."""
        has_any = conversation.known_tools or any(each.calls for each in conversation.messages)
        if self.marker is None or not has_any:
            return ()
        return (self.marker.tokens, *sorted(self.marker.spellings))

    def _format_of(self, chat: Chat, functions: Sequence[Function]) -> AnswerFormat:
        """How the answer is read. An answer that has to have a structure has no calls that begin
        without a marker: they would look like it.
        """
        if not functions:
            return self._format_without_calls
        if chat.structure is None or chat.conversation.tool_choice.must_call:
            return self._format
        assert self.tools is not None
        return replace(self._format, tools=replace(self.tools, leading=()))

    def _check_functions(self, functions: Sequence[Function], field: str) -> None:
        """Raise ApiError (400) where the model calls none, or it takes too long to follow what all
        of their schemas say.
        """
        if self.tools is None:
            message = "no format of tool calls is known for this model (tool_parser)"
            raise InvalidField(field, message, UNSUPPORTED)
        try:
            check_work(function.parameters for function in functions)
        except ValueError as error:
            raise InvalidField(field, str(error)) from error

    def text_constraint(self, structure: Structure | None) -> Constraint | None:
        """The constraint of a text completion, if it must be anything."""
        return answer_constraint(structure, self._settings)

    def _has_special_markers(self, functions: Sequence[Function]) -> bool:
        markers = [*self.tools.begins] if self.tools and functions else []
        if self._reasoning:
            markers += [self._reasoning.begin, self._reasoning.end]
        special = self._tokenizer.special_tokens
        return any(token in marker for marker in markers for token in special)


def _prefill(conversation: Conversation) -> str:
    """The beginning of the answer that the client has written; "" where it has written none."""
    if not conversation.continue_final_message:
        return ""
    return conversation.messages[-1].text
