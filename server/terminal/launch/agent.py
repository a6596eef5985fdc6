"""What an agent is to `rootstock launch`: a program, and what it needs to use a server."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

MOST_ANSWER_TOKENS = 32_000  # what Claude Code and OpenCode allow an answer at most
ROOM_TOKENS = 4_000  # behind the first request: for answers, and for what the first tools say


@dataclass(frozen=True, slots=True)
class Target:
    """A model of a server. The base URL ends in /v1; a key is never empty, because agents ask for
    one even where the server does not. `context_tokens` is None where the server does not say.
    `folder` is ours: where an agent may be given files. It is this server's and model's alone.
    """

    base_url: str
    model: str
    api_key: str
    context_tokens: int | None
    folder: Path

    @property
    def root_url(self) -> str:
        return self.base_url.removesuffix("/v1")

    @property
    def answer_tokens(self) -> int | None:
        """The most that an answer may have: a share that leaves most of the context to the prompt.
        None where the context is not known.
        """
        if self.context_tokens is None:
            return None
        return min(MOST_ANSWER_TOKENS, self.context_tokens // 4)


@dataclass(frozen=True, slots=True)
class Setup:
    """The environment of a process (None unsets a variable), its first arguments, and the files
    that are written before. `newer_flags` are passed to those versions whose `--help` names them.
    """

    variables: Mapping[str, str | None]
    arguments: tuple[str, ...] = ()
    newer_flags: tuple[str, ...] = ()
    files: Mapping[Path, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Agent:
    """A coding agent: its command, where it comes from (the end of a sentence), and its setup.

    `first_request_tokens` is what a session in a terminal begins with, rounded up; None where
    nobody has measured it. docs/clients.md has the versions.
    """

    command: str
    origin: str
    setup: Callable[[Target], Setup]
    first_request_tokens: int | None
    usual_arguments: tuple[str, ...] = ()  # where the user gives none

    @property
    def least_context_tokens(self) -> int:
        """With less a session comes to nothing. 0 where that is not known."""
        if self.first_request_tokens is None:
            return 0
        return self.first_request_tokens + ROOM_TOKENS
