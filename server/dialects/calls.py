"""How calls are written: in chat completions as `tool_calls`, or `function_call` in answer to
`functions`, and in dialects that have no JSON text as objects.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jiter

from server.generation.answer import WrittenCall
from server.parsing.parts import AnswerPart, CallArguments, CallBegun, Content, Reasoning
from server.schemas.chat import (
    CalledCustomTool,
    CalledFunction,
    ChatFinishReason,
    ChatRequest,
    CustomDelta,
    CustomToolCallBody,
    CustomToolCallDelta,
    Delta,
    FunctionDelta,
    ToolCallBody,
    ToolCallDelta,
)
from server.schemas.custom_tools import custom_input
from server.schemas.tools import ChatCustomTool


def call_shape(body: ChatRequest) -> "CallShape":
    """The shape in which a request's answers have calls."""
    if body.functions:
        return FunctionCallShape()
    return ToolCallShape(
        frozenset(tool.custom.name for tool in body.tools if isinstance(tool, ChatCustomTool))
    )


def as_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call as an object; of one that was cut off, as much as there is."""
    try:
        value = jiter.from_json(text.encode(), partial_mode=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class Deltas(ABC):
    """The parts of one answer as the deltas of its chunks."""

    def add(self, parts: Iterable[AnswerPart]) -> Iterator[Delta]:
        for part in parts:
            match part:
                case Content(text):
                    yield from self.close()
                    yield Delta(content=text)
                case Reasoning(text):
                    yield from self.close()
                    yield Delta(reasoning_content=text, reasoning=text)
                case CallBegun():
                    yield from self.close()
                    yield from self.begun(part)
                case CallArguments():
                    yield from self.grown(part)

    def close(self) -> Iterator[Delta]:
        """What is still to be said of the call that began last."""
        return iter(())

    @abstractmethod
    def begun(self, call: CallBegun) -> Iterator[Delta]: ...

    @abstractmethod
    def grown(self, call: CallArguments) -> Iterator[Delta]: ...


class CallShape(ABC):
    """How the calls of an answer are written."""

    finish_reason: ChatFinishReason

    @abstractmethod
    def fields(self, calls: Sequence[WrittenCall]) -> dict[str, Any]:
        """The fields of a message with these calls, of which there is one at least."""

    @abstractmethod
    def deltas(self) -> Deltas: ...


class ToolCallShape(CallShape):
    """`tool_calls`, of functions and of the `custom` tools with these names."""

    finish_reason = "tool_calls"

    def __init__(self, custom: frozenset[str]) -> None:
        self._custom = custom

    def fields(self, calls: Sequence[WrittenCall]) -> dict[str, Any]:
        return {"tool_calls": [self._body(call) for call in calls]}

    def deltas(self) -> Deltas:
        return _ToolCallDeltas(self._custom)

    def _body(self, call: WrittenCall) -> ToolCallBody | CustomToolCallBody:
        if call.name in self._custom:
            custom = CalledCustomTool(name=call.name, input=custom_input(call.arguments))
            return CustomToolCallBody(id=call.id, type="custom", custom=custom)
        function = CalledFunction(name=call.name, arguments=call.arguments)
        return ToolCallBody(id=call.id, type="function", function=function)


class _ToolCallDeltas(Deltas):
    """The input of a custom tool is read from the arguments when they are complete."""

    def __init__(self, custom: frozenset[str]) -> None:
        self._custom = custom
        self._open: CallBegun | None = None  # of a custom tool
        self._arguments: list[str] = []  # the open call's

    def begun(self, call: CallBegun) -> Iterator[Delta]:
        index, id, name = call.index, call.id, call.name
        if name in self._custom:
            self._open, self._arguments = call, []
            custom = CustomDelta(name=name, input="")
            yield _tool(CustomToolCallDelta(index=index, id=id, type="custom", custom=custom))
        else:
            function = FunctionDelta(name=name, arguments="")
            yield _tool(ToolCallDelta(index=index, id=id, type="function", function=function))

    def grown(self, call: CallArguments) -> Iterator[Delta]:
        if self._open is not None:
            self._arguments.append(call.text)
        else:
            function = FunctionDelta(arguments=call.text)
            yield _tool(ToolCallDelta(index=call.index, function=function))

    def close(self) -> Iterator[Delta]:
        if self._open is not None:
            custom = CustomDelta(input=custom_input("".join(self._arguments)))
            yield _tool(CustomToolCallDelta(index=self._open.index, custom=custom))
            self._open = None


def _tool(call: ToolCallDelta | CustomToolCallDelta) -> Delta:
    return Delta(tool_calls=[call])


class FunctionCallShape(CallShape):
    """A `function_call`, of which a message has one: the first."""

    finish_reason = "function_call"

    def fields(self, calls: Sequence[WrittenCall]) -> dict[str, Any]:
        call = calls[0]
        return {"function_call": CalledFunction(name=call.name, arguments=call.arguments)}

    def deltas(self) -> Deltas:
        return _FunctionCallDeltas()


class _FunctionCallDeltas(Deltas):
    def begun(self, call: CallBegun) -> Iterator[Delta]:
        if call.index == 0:
            yield Delta(function_call=FunctionDelta(name=call.name, arguments=""))

    def grown(self, call: CallArguments) -> Iterator[Delta]:
        if call.index == 0:
            yield Delta(function_call=FunctionDelta(arguments=call.text))
