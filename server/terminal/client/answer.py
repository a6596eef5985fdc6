"""One streamed answer: its text, its times, and its summary line. No I/O, no clock."""

from dataclasses import dataclass

from server.terminal.client.events import Event, Finish, Reasoning, Text, Usage


@dataclass(slots=True)
class Answer:
    """Collects events. All times are seconds on one clock of the caller's."""

    asked_at: float
    text: str = ""
    usage: Usage | None = None
    finish_reason: str = ""
    interrupted: bool = False  # by the user, who has seen enough
    pieces: int = 0
    first_at: float = 0.0  # the first piece of text or reasoning
    last_at: float = 0.0  # the last one, or the finish: its token may have no text

    def add(self, event: Event, now: float) -> None:
        match event:
            case Text(text):
                self.text += text
                self._piece(now)
            case Reasoning():
                self._piece(now)
            case Finish(reason):
                self.finish_reason = reason
                self.last_at = now
            case Usage():
                self.usage = event

    @property
    def first_seconds(self) -> float | None:
        """From the question to the first piece; None without any."""
        return self.first_at - self.asked_at if self.pieces else None

    @property
    def tokens_per_second(self) -> float | None:
        """The decoding speed, after the first token. None where it is unknown: all text came in one
        piece, or the server reported no usage.
        """
        decode_seconds = self.last_at - self.first_at
        if self.usage is None or self.pieces < 2 or decode_seconds <= 0:
            return None
        return (self.usage.completion_tokens - 1) / decode_seconds

    def summary(self) -> str:
        """Tokens, speed and what else is worth knowing; what the server did not say is omitted."""
        return " · ".join([*_counts(self.usage), *self._times(), *self._ending()])

    def _piece(self, now: float) -> None:
        if self.pieces == 0:
            self.first_at = now
        self.pieces += 1
        self.last_at = now

    def _times(self) -> list[str]:
        speed, first = self.tokens_per_second, self.first_seconds
        return [
            *([] if speed is None else [f"{speed:.1f} tokens/s"]),
            *([] if first is None else [f"first after {first:.2f} s"]),
        ]

    def _ending(self) -> list[str]:
        if self.interrupted:
            return ["stopped"]
        match self.finish_reason:
            case "" | "stop":
                return []
            case "length":
                return ["cut off by the token limit"]
            case other:
                return [f"ended by {other}"]


def _counts(usage: Usage | None) -> list[str]:
    if usage is None:
        return []
    cached = "" if usage.cached_tokens is None else f" ({usage.cached_tokens:,} cached)"
    return [
        f"prompt {usage.prompt_tokens:,} tokens{cached}",
        f"answer {usage.completion_tokens:,} tokens",
    ]
