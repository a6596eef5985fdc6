"""Which roles a chat template renders where, found by rendering probe messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.values.model import Tokenizer
from server.generation.history import REASONING_FIELDS

_WORD = "somethingthatissaid"
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {}}}
_RESULT: Sequence[Mapping[str, object]] = (
    {"role": "user", "content": "A"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": _WORD},
)
_BEHIND_RESULT = (
    *_RESULT[:-1],
    {**_RESULT[-1], "content": "B"},
    {"role": "user", "content": _WORD},
)
_LATE_SYSTEM = (
    {"role": "system", "content": "A"},
    {"role": "user", "content": "B"},
    {"role": "system", "content": _WORD},
    {"role": "assistant", "content": "C"},
    {"role": "user", "content": "D"},
)


def _called(content: str, reasoning: str) -> Sequence[Mapping[str, object]]:
    thoughts = dict.fromkeys(REASONING_FIELDS, reasoning)
    call = {**_RESULT[1], "content": content, **thoughts}
    return (_RESULT[0], call, {**_RESULT[2], "content": "B"})


_PREAMBLE = _called(_WORD, "C")
_THOUGHT_PREAMBLE = _called("", f"C\n\n{_WORD}")


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles or fields under which a template renders what not every template can.

    `late_system`: the role of system messages after the first. `behind_results`: the role of a user
    message right after tool results. `preambles`: the field of an assistant's text before a call,
    where there is reasoning too.
    """

    late_system: Literal["system", "user"]
    behind_results: Literal["user", "tool"]
    preambles: Literal["content", "reasoning"]


def roles_of(tokenizer: Tokenizer) -> Roles:
    """The roles with which the model's template raises no error and leaves nothing out."""
    has_late_system = _says(tokenizer, _LATE_SYSTEM)
    needs_an_answer = _says(tokenizer, _RESULT) and not _says(tokenizer, _BEHIND_RESULT)
    wants_one = not _says(tokenizer, _PREAMBLE) and _says(tokenizer, _THOUGHT_PREAMBLE)
    return Roles(
        late_system="system" if has_late_system else "user",
        behind_results="tool" if needs_an_answer else "user",
        preambles="reasoning" if wants_one else "content",
    )


def _says(tokenizer: Tokenizer, messages: Sequence[Mapping[str, object]]) -> bool:
    try:
        return _WORD in tokenizer.decode(tokenizer.apply_chat_template(messages))
    except ValueError:
        return False
