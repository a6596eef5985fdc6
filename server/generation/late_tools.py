"""Tools that stand in the prompt where the conversation came to know them.

A template renders the tools of a conversation at its head, so a tool that is added, left out or
moved there changes the prompt from its first tokens on, and nothing of it is found in the prefix
cache. Here a conversation's prompt only grows: what stood at its head stays there, and a tool that
comes later is described in the message with which it comes.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from operator import itemgetter
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

from pydantic_core import from_json, to_json

from engine.values.model import Tokenizer
from server.generation.conversation import Conversation, Message, Part, Text, texts
from server.generation.template import (
    TemplateTraits,
    declared_tools,
    in_place,
    template_messages,
)
from server.generation.tools import Tool

MAX_CONVERSATIONS = 1024
MAX_BYTES = 16 << 20


class Declaration(NamedTuple):
    """A tool as it is declared in a prompt, as JSON."""

    name: str
    json: bytes


def read(declaration: Declaration) -> Mapping[str, Any]:
    """The declaration as an object."""
    declared: Mapping[str, Any] = from_json(declaration.json)
    return declared


@dataclass(frozen=True, slots=True)
class PlacedTools:
    """Where a conversation's prompt has its tools: `head` are those that the template renders,
    `late` others, each with the index of the message that describes it.
    """

    head: tuple[Declaration, ...] = ()
    late: tuple[tuple[int, Declaration], ...] = ()

    @property
    def by_name(self) -> Mapping[str, Declaration]:
        return {each.name: each for each in (*self.head, *(one for _, one in self.late))}


class ToolPlaces:
    """Remembers where conversations have their tools, by a digest of their messages and the
    `cache_salt`. The least recently used ones are forgotten beyond a number of conversations and of
    bytes. Safe from any thread.
    """

    def __init__(
        self, max_conversations: int = MAX_CONVERSATIONS, max_bytes: int = MAX_BYTES
    ) -> None:
        self._max_conversations = max_conversations
        self._max_bytes = max_bytes
        self._known: OrderedDict[_Key, PlacedTools] = OrderedDict()
        self._heads: dict[tuple[Declaration, ...], _SharedHead] = {}
        self._n_bytes = 0
        self._lock = Lock()

    def place(self, conversation: Conversation, cache_salt: str) -> PlacedTools:
        """Where a conversation has its tools: as before if it continues one that is known."""
        found = list(_digests(conversation.messages))
        placed = self._continued(conversation, found, cache_salt) or first_placed(conversation)
        if placed.head:
            self._remember((cache_salt, found[-1], len(conversation.messages)), placed)
        return placed

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._known.clear()
            self._heads.clear()
            self._n_bytes = 0

    def _continued(
        self, conversation: Conversation, found: Sequence[bytes], cache_salt: str
    ) -> PlacedTools | None:
        """The places of the longest beginning that is remembered, and of the tools that have come
        since; None where there is none, or they cannot stay.
        """
        for n_messages in reversed(range(1, _last_place(conversation.messages) + 1)):
            with self._lock:
                before = self._known.get((cache_salt, found[n_messages], n_messages))
            if before is not None:
                return _grown(conversation, before, n_messages)
        return None

    def _remember(self, key: "_Key", placed: PlacedTools) -> None:
        with self._lock:
            self._forget(key)
            shared = self._heads.setdefault(placed.head, _SharedHead(placed.head))
            self._known[key] = PlacedTools(shared.head, placed.late)
            self._n_bytes += _late_bytes(placed) + (0 if shared.n_uses else shared.n_bytes)
            shared.n_uses += 1
            while self._n_bytes > self._max_bytes or len(self._known) > self._max_conversations:
                self._forget(next(iter(self._known)))

    def _forget(self, key: "_Key") -> None:
        placed = self._known.pop(key, None)
        if placed is None:
            return
        shared = self._heads[placed.head]
        shared.n_uses -= 1
        self._n_bytes -= _late_bytes(placed) + (0 if shared.n_uses else shared.n_bytes)
        if not shared.n_uses:
            del self._heads[placed.head]


_Key: TypeAlias = tuple[str, bytes, int]
"""The `cache_salt`, the digest of the messages, and their number."""


@dataclass(slots=True)
class _SharedHead:
    """A head that several turns of a conversation have."""

    head: tuple[Declaration, ...]
    n_uses: int = 0

    @property
    def n_bytes(self) -> int:
        return sum(len(each.json) for each in self.head)


def _late_bytes(placed: PlacedTools) -> int:
    return sum(len(each.json) for _, each in placed.late)


def first_placed(conversation: Conversation) -> PlacedTools:
    """The places of tools in a conversation of which nothing is remembered.

    Without a head there is nothing that tells the model how tools are called, so the first tools
    that come late are the head. So are those that come before anybody has said anything.
    """
    late = list(_late(conversation))
    come_late = {tool.name for _, tool in late}
    known = {tool.name: tool for tool in conversation.known_tools}
    head = [tool for name, tool in known.items() if name not in come_late]
    begun = next((at for at, each in enumerate(conversation.messages) if each.role != "system"), 0)
    first = max(begun, late[0][0] + 1) if late and not head else begun
    head += [known[tool.name] for at, tool in late if at < first]
    return PlacedTools(
        tuple(map(_declaration, head)),
        tuple((at, _declaration(known[tool.name])) for at, tool in late if at >= first),
    )


def _late(conversation: Conversation) -> Iterator[tuple[int, Tool]]:
    """The tools that messages make known, each once, and the message that describes it: that one,
    or the next that is not the assistant's, whose words stay its own.
    """
    messages, seen = conversation.messages, set[str]()
    for index, message in enumerate(messages):
        for tool in message.tools:
            if tool.name not in seen:
                seen.add(tool.name)
                later = (at for at in range(index, len(messages)) if _can_describe(messages[at]))
                yield next(later, _last_place(messages)), tool


def _grown(conversation: Conversation, before: PlacedTools, n_messages: int) -> PlacedTools | None:
    """The places in a conversation whose first n_messages had their tools in the places `before`.
    None if it has another tool by a name of one of these.

    Tools that are no longer declared stay in the prompt where those messages have calls, whose ids
    nobody else knows: other clients' tools are not shown to one who merely begins alike.
    """
    known = {tool.name: _declaration(tool) for tool in conversation.known_tools}
    had = before.by_name
    if any(known.get(name, each) != each for name, each in had.items()):
        return None
    has_calls = any(message.calls for message in conversation.messages[:n_messages])
    if had.keys() - known.keys() and not has_calls:
        return None
    late, placed = [*before.late], {*had}
    for at, tool in _late(conversation):
        if at >= n_messages and tool.name not in placed:
            placed.add(tool.name)
            late.append((at, known[tool.name]))
    since = range(n_messages, len(conversation.messages))
    at = next(at for at in since if _can_describe(conversation.messages[at]))
    late += [(at, each) for name, each in known.items() if name not in placed]
    return PlacedTools(before.head, tuple(sorted(late, key=itemgetter(0))))


def _last_place(messages: Sequence[Message]) -> int:
    """The index of the last message that can describe tools; 0 where none can."""
    places = [at for at, message in enumerate(messages) if _can_describe(message)]
    return places[-1] if places else 0


def _can_describe(message: Message) -> bool:
    return message.role != "assistant"


def _digests(messages: Sequence[Message]) -> Iterator[bytes]:
    """For each message a digest of those before it, then the digest of all. With other instructions
    at its head a prompt is another one, so these count.
    """
    found = blake2b(digest_size=16)
    yield found.digest()
    for message in messages:
        found.update(repr(message.identity).encode())
        yield found.digest()


def _declaration(tool: Tool) -> Declaration:
    return Declaration(tool.name, to_json(tool.declared))


_HEADING = "From here on these tools can be called, too:"

Describe = Callable[[Declaration], str]
"""Describes a tool in the form of the model's template."""


def with_late_tools(
    messages: Sequence[Message], placed: PlacedTools, describe: Describe
) -> Sequence[Message]:
    """The messages, with late tools described after their text. A result whose search named tools
    that do not exist says so. System messages that only name tools are left out.
    """
    if not placed.late and not any(map(_names_tools, messages)):
        return messages
    added = dict[int, list[str]]()
    for at, declaration in placed.late:
        added.setdefault(at, [_HEADING]).append(describe(declaration))
    known = placed.by_name
    for at, message in enumerate(messages):
        absent = [name for name in message.undeclared_tools if name not in known]
        if absent and message.role != "system":
            added.setdefault(at, []).extend(f"There is no tool {name}." for name in absent)
    told = [
        replace(message, parts=(*_without_empty(message.parts), *texts("\n".join(added[at]))))
        if at in added
        else message
        for at, message in enumerate(messages)
    ]
    return [each for each in told if each.parts or not _names_tools(each) or each.role != "system"]


def _without_empty(parts: Sequence[Part]) -> Sequence[Part]:
    return [part for part in parts if part != Text("")]


def _names_tools(message: Message) -> bool:
    return bool(message.tools or message.undeclared_tools)


_PROBE: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "probe",
        "parameters": {"type": "object", "properties": {}},
    },
}


def description(tokenizer: Tokenizer, traits: TemplateTraits, declaration: Declaration) -> str:
    """The tool in the form in which the model's template renders one: what the tool adds to a
    prompt that has another tool. As JSON where the template renders none, or renders it with
    control tokens, which are not read in the midst of a text.
    """
    declared = read(declaration)
    shown = template_messages(in_place([_ANYTHING], traits), traits)
    try:
        without, added = (
            tokenizer.decode(
                tokenizer.apply_chat_template(shown, tools=declared_tools(tools, traits))
            )
            for tools in ([_PROBE], [_PROBE, declared])
        )
    except ValueError:
        without = added = ""
    text = _inserted(without, added).strip("\n")
    if declaration.name not in text or any(token in text for token in tokenizer.added_tokens):
        return json.dumps(declared, ensure_ascii=False)
    return text


_ANYTHING = Message(role="user", parts=texts("A"))


def _inserted(before: str, after: str) -> str:
    """What the longer text has between the beginning and the end that both have."""
    n_same = next(
        (at for at, (one, two) in enumerate(zip(before, after, strict=False)) if one != two),
        min(len(before), len(after)),
    )
    n_end = 0
    while n_end < len(before) - n_same and before[-1 - n_end] == after[-1 - n_end]:
        n_end += 1
    return after[n_same : len(after) - n_end]
