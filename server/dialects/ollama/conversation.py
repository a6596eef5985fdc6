"""Ollama's messages as chat messages."""

import json
from collections.abc import Iterator, Sequence
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
        self._waiting: list[FunctionToolCall] = []

    def read(self, message: OllamaMessageParam) -> Message:
        calls: list[ToolCall] = [self._call(call) for call in message.tool_calls]
        is_empty = message.role == "assistant" and not message.content
        return Message(
            role=message.role,
            content=None if is_empty else [TextPart(type="text", text=message.content)],
            name=message.tool_name,
            tool_calls=calls or None,
            tool_call_id=self._answered(message) if message.role == "tool" else None,
            reasoning_content=message.thinking,
        )

    def _call(self, call: OllamaToolCallParam) -> FunctionToolCall:
        arguments = json.dumps(call.function.arguments, ensure_ascii=False)
        function = FunctionCall(name=call.function.name, arguments=arguments)
        made = FunctionToolCall(id=call.id or next(self._ids), function=function)
        self._waiting.append(made)
        return made

    def _answered(self, result: OllamaMessageParam) -> str | None:
        """The id of the call whose result it is, which waits no more."""
        call = next(self._candidates(result), None)
        if call is None:
            return result.tool_call_id
        self._waiting.remove(call)
        return call.id

    def _candidates(self, result: OllamaMessageParam) -> Iterator[FunctionToolCall]:
        for call in self._waiting:
            if result.tool_call_id:
                fits = call.id == result.tool_call_id
            else:
                fits = result.tool_name in {None, call.function.name}
            if fits:
                yield call
