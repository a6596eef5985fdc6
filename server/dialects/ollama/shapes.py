"""The two shapes of an answer: of a chat and of a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from server.dialects.calls import as_arguments
from server.generation.answer import WrittenCall
from server.schemas.ollama.answer import (
    OllamaAnswer,
    OllamaChatAnswer,
    OllamaFunction,
    OllamaGenerateAnswer,
    OllamaMessage,
    OllamaToolCall,
)


@dataclass(frozen=True, slots=True)
class Said:
    """What one line says, or a whole answer. The first of the calls is number `first_call`."""

    content: str = ""
    thinking: str = ""
    calls: Sequence[WrittenCall] = field(default_factory=tuple)
    first_call: int = 0


class Shape(Protocol):
    """Makes an answer of what is said and of the fields around it."""

    def __call__(self, said: Said, /, **fields: Any) -> OllamaAnswer: ...


def chat_answer(said: Said, /, **fields: Any) -> OllamaAnswer:
    extras: dict[str, Any] = {"thinking": said.thinking} if said.thinking else {}
    if said.calls:
        extras["tool_calls"] = [
            _call(index, call) for index, call in enumerate(said.calls, said.first_call)
        ]
    message = OllamaMessage(role="assistant", content=said.content, **extras)
    return OllamaChatAnswer(message=message, **fields)


def generate_answer(said: Said, /, **fields: Any) -> OllamaAnswer:
    extras = {"thinking": said.thinking} if said.thinking else {}
    return OllamaGenerateAnswer(response=said.content, **extras, **fields)


def _call(index: int, call: WrittenCall) -> OllamaToolCall:
    arguments = as_arguments(call.arguments)
    function = OllamaFunction(index=index, name=call.name, arguments=arguments)
    return OllamaToolCall(id=call.id, function=function)
