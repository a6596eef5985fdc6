"""What a client puts into the history, and so what it must ask for."""

from typing import Protocol

from load_tests.agents.dialects.dialect import Choice, Told
from load_tests.agents.recording import Answer
from load_tests.client import TargetError


class Style(Protocol):
    """How a session is replayed."""

    @property
    def name(self) -> str: ...

    @property
    def choice(self) -> Choice: ...

    @property
    def max_tokens(self) -> int: ...

    def kept(self, recorded: Answer, told: Told) -> Answer:
        """The answer that the history gets."""

    def kept_tokens(self, told: Told) -> int:
        """How many of the tokens computed for an answer are in the next prompt, too."""

    def check(self, told: Told, rendered_tokens: int) -> None:
        """Raise TargetError for an answer to another prompt than the template makes."""


class Recorded:
    """The recording's answers go back, whatever the daemon says: every prompt is known."""

    name = "the recorded answers"
    choice: Choice = "auto"
    max_tokens = 8

    def kept(self, recorded: Answer, told: Told) -> Answer:
        return recorded

    def kept_tokens(self, told: Told) -> int:
        return 0

    def check(self, told: Told, rendered_tokens: int) -> None:
        if told.prompt_tokens != rendered_tokens:
            raise TargetError(
                f"{told.prompt_tokens} tokens of prompt, where the template makes {rendered_tokens}"
            )


class Own:
    """The daemon's answers go back, as clients do it. Each must be a call.

    Prompts have the tokens that were generated, which the template would write otherwise.
    """

    name = "the daemon's own answers"
    choice: Choice = "required"
    max_tokens = 512

    def kept(self, recorded: Answer, told: Told) -> Answer:
        return told.answer

    def kept_tokens(self, told: Told) -> int:
        return told.output_tokens - 1  # the last one was sampled, not computed

    def check(self, told: Told, rendered_tokens: int) -> None:
        if not told.answer.calls:
            raise TargetError(f"an answer without a call: {told.answer.text[:200]!r}")


STYLES: tuple[Style, ...] = (Recorded(), Own())
