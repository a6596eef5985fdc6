"""What a model is made to write: the answer that a request asks for, and calls of its tools."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from engine.values.model import Tokenizer
from engine.values.request import Alternative, Constraint, Grammar, GrammarKind
from server.errors import invalid
from server.generation.chat import Chat, Structure
from server.generation.structure import of_schema
from server.generation.thinking import Thinking
from server.generation.tools import must_call
from server.parsing.answer import ToolFormat
from server.parsing.closed_schemas import closed
from server.parsing.lark import Function, NotASchema, calls_grammar, loosened
from server.settings.conversation import ConversationSettings


def answer_constraint(
    structure: Structure | None, settings: ConversationSettings
) -> Constraint | None:
    """The constraint on what is answered, if it must be anything. Raises ApiError (400) for a
    grammar that is too long: nothing is made of it.
    """
    if structure is None:
        return None
    param, grammar = structure
    if problem := grammar.too_long:
        raise invalid(f"{param}: {problem}", param)
    is_schema = grammar.kind is GrammarKind.JSON_SCHEMA
    return Constraint(
        _closed(grammar) if is_schema and settings.json_schemas == "closed" else grammar, param
    )


def _closed(grammar: Grammar) -> Grammar:
    """What is no schema stays as it is: it is refused, with the reason, where it is tried."""
    with suppress(ValueError, RecursionError):
        schema = json.loads(grammar.text)
        return of_schema(closed(schema)) if isinstance(schema, dict) else grammar
    return grammar


@dataclass(frozen=True, slots=True)
class _Marker:
    """The tokens with which calls begin, and no other text does, and what they spell of a call."""

    tokens: tuple[int, ...]
    text: str


class ConstraintWriter:
    """Writes the constraints of one request's answers."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: ToolFormat | None,
        thinking: Thinking,
        settings: ConversationSettings,
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._thinking = thinking
        self._settings = settings

    def constraint(self, chat: Chat, functions: Sequence[Function]) -> Constraint | None:
        """Raises ApiError (400) for a tool that cannot be held to its schema, but must be."""
        tools = self._tools if functions else None
        if tools is not None and must_call(chat.conversation.tool_choice):
            begin = self._encoded(tools.syntax.opens + tools.syntax.begin)
            grammar = self._required(tools, functions, many=chat.parallel_calls)
            return Constraint(grammar, "tools", thinking=self._thinking.before_calls(begin))
        marker = self._marker(tools) if tools is not None else None
        calls = self._once_begun(tools, marker, chat, functions) if tools and marker else None
        answer = answer_constraint(chat.structure, self._settings)
        if answer is None:
            return calls
        return replace(
            answer,
            thinking=self._thinking.before_content(),
            instead=_in_place(marker, calls) if marker else None,
        )

    def _marker(self, tools: ToolFormat) -> _Marker | None:
        """Text may be spelled in other tokens, so a marker has to begin with an added one. Behind
        the last of these its last token may be spelled with what follows, and does not count.
        """
        added = self._tokenizer.added_tokens
        for text in tools.begins:
            if text in added:
                return _Marker((added[text],), text)
        ids = frozenset(added.values())
        for text in tools.begins:
            tokens = self._encoded(text)
            first = next((at for at, token in enumerate(tokens) if token in ids), len(tokens))
            if run := tokens[first:] if tokens[-1] in ids else tokens[first:-1]:
                return _Marker(tuple(run), self._tokenizer.decode(run))
        return None

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _once_begun(
        self, tools: ToolFormat, marker: _Marker, chat: Chat, functions: Sequence[Function]
    ) -> Constraint | None:
        """The constraint on calls that the model chooses to make; None where all are allowed."""
        parallel = chat.parallel_calls
        is_promised = not parallel or any(function.strict for function in functions)
        is_promised |= len(functions) < len(chat.conversation.tools)
        if not is_promised and self._settings.tool_guides == "strict-only":
            return None
        # Behind a marker that not each call has, others may follow.
        many = parallel and marker.text not in tools.syntax.begin
        first, *weaker = self._weakening(tools, functions, many=many, behind=marker.text)
        return Constraint(
            first,
            "tools",
            thinking=self._thinking.before_calls(marker.tokens),
            behind=marker.tokens,
            repeats=parallel,
            weaker=(*weaker,) if is_promised else (*weaker, None),
        )

    def _weakening(
        self, tools: ToolFormat, functions: Sequence[Function], *, many: bool, behind: str
    ) -> list[Grammar]:
        """Grammars for the calls: with all that schemas say, and with the names alone of what is
        not strict."""
        loose = [loosened(function) for function in functions]
        whole = list[Grammar]()
        with suppress(NotASchema):
            whole = [self._calls(tools, functions, many=many, behind=behind)]
        try:
            names = self._calls(tools, loose, many=many, behind=behind)
        except NotASchema as error:
            raise _no_schema(error) from error
        return list(dict.fromkeys([*whole, names]))

    def _required(self, tools: ToolFormat, functions: Sequence[Function], *, many: bool) -> Grammar:
        try:
            return self._calls(tools, functions, many=many)
        except NotASchema as error:
            raise _no_schema(error) from error

    def _calls(
        self, tools: ToolFormat, functions: Sequence[Function], *, many: bool, behind: str = ""
    ) -> Grammar:
        """Raises NotASchema."""
        tokens = self._tokenizer.added_tokens
        text = calls_grammar(tools.syntax, functions, tokens, many=many, behind=behind)
        return Grammar(GrammarKind.LARK, text)


def _in_place(marker: _Marker, calls: Constraint | None) -> Alternative | None:
    """Calls in place of an answer: the first token tells, so that has to be all of the marker. It
    comes behind the reasoning."""
    if len(marker.tokens) > 1:
        return None
    return Alternative(marker.tokens[0], replace(calls, thinking=None) if calls else None)


def _no_schema(error: NotASchema) -> Exception:
    return invalid(f"tools: {error}", "tools")
