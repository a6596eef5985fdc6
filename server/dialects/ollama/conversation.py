"""Ollama's messages as chat messages."""

import json
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from itertools import count

from server.schemas.chat import Message, TextPart
from server.schemas.ollama.request import OllamaMessageParam, OllamaToolCallParam
from server.schemas.tools import FunctionCall, FunctionToolCall, ToolCall


def chat_messages(messages: Sequence[OllamaMessageParam]) -> list[Message]:
    """The conversation. Calls and results that have no ids get some: a result without one answers
    the first call of its `tool_name` that waits, or the first of all.
    """
    reader = _Reader()
    return [reader.read(message) for message in messages]


class _Reader:
    def __init__(self) -> None:
        self._ids = (f"call{number:05}" for number in count(1))  # nine characters, as Mistral's
        self._waiting = _Waiting()

    def read(self, message: OllamaMessageParam) -> Message:
        calls: list[ToolCall] = [self._call(call) for call in message.tool_calls]
        is_empty = message.role == "assistant" and not message.content
        return Message(
            role=message.role,
            content=None if is_empty else [TextPart(type="text", text=message.content)],
            name=message.tool_name,
            tool_calls=calls or None,
            tool_call_id=self._waiting.answered(message) if message.role == "tool" else None,
            reasoning_content=message.thinking,
        )

    def _call(self, call: OllamaToolCallParam) -> FunctionToolCall:
        arguments = json.dumps(call.function.arguments, ensure_ascii=False)
        function = FunctionCall(name=call.function.name, arguments=arguments)
        made = FunctionToolCall(id=call.id or next(self._ids), function=function)
        self._waiting.add(made)
        return made


class _Waiting:
    """The ids of calls without a result, however many there are, found at once."""

    def __init__(self) -> None:
        self._all: OrderedDict[str, None] = OrderedDict()
        self._by_name: defaultdict[str, deque[str]] = defaultdict(deque)  # and answered ones

    def add(self, call: FunctionToolCall) -> None:
        self._all[call.id] = None
        self._by_name[call.function.name].append(call.id)

    def answered(self, result: OllamaMessageParam) -> str | None:
        """The id of the call whose result it is, which waits no more."""
        found = result.tool_call_id or self._first(result.tool_name)
        if found is not None:
            self._all.pop(found, None)
        return found

    def _first(self, name: str | None) -> str | None:
        if name is None:
            return next(iter(self._all), None)
        ids = self._by_name[name]
        while ids and ids[0] not in self._all:
            ids.popleft()
        return ids[0] if ids else None
