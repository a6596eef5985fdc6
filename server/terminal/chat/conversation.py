"""The conversation of a chat. Immutable: a turn that fails never becomes part of it."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer."""

    user: str
    assistant: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Complete turns, and the system prompt above them ("" is none)."""

    system: str = ""
    turns: tuple[Turn, ...] = ()

    def asking(self, text: str) -> list[dict[str, str]]:
        """The messages that ask for an answer to `text`."""
        messages = [_message("system", self.system)] if self.system else []
        for turn in self.turns:
            messages += [_message("user", turn.user), _message("assistant", turn.assistant)]
        return [*messages, _message("user", text)]

    def answered(self, text: str, answer: str) -> "Conversation":
        return replace(self, turns=(*self.turns, Turn(text, answer)))

    def cleared(self) -> "Conversation":
        """Without its turns; the system prompt stays."""
        return replace(self, turns=())

    def with_system(self, system: str) -> "Conversation":
        return replace(self, system=system)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
