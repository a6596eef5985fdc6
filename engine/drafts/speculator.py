"""Begins the speculation of each sequence, and remembers what sequences have generated."""

from engine.drafts.speculation import NO_SPECULATION, Speculation
from engine.types.request import Request
from kvstore.tokens import Tokens
from kvstore.types import Namespace


class Speculator:
    """Drafts nothing: what `--speculate off` uses. This base class is the interface."""

    def begin(self, request: Request, namespace: Namespace, prompt: Tokens) -> Speculation:
        """The speculation of one of the request's sequences."""
        return NO_SPECULATION

    def ended(self, namespace: Namespace, tokens: Tokens, prompt_tokens: int) -> None:
        """A sequence has ended: what it has generated stands behind so many tokens."""

    def clear(self, namespace: Namespace | None = None) -> None:
        """Forget what the sequences of a namespace have generated, or of all."""


NO_SPECULATOR = Speculator()
