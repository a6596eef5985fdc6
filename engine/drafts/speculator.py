"""Begins the speculation of each sequence, and remembers what sequences have generated."""

from functools import partial

from engine.drafts.acceptance import AcceptanceRates, SequenceRates
from engine.drafts.answers import Answers
from engine.drafts.drafter import Drafter, Forced
from engine.drafts.speculation import (
    MOST_PATIENCE,
    NO_SPECULATION,
    LiveSpeculation,
    Speculation,
)
from engine.drafts.suffix_index import SortedText
from engine.types.request import Request
from kvstore.store import KVStore
from kvstore.tokens import Tokens
from kvstore.types import Namespace


class Speculator:
    """Drafts nothing: what `--speculate off` uses. This base class is the interface."""

    def begin(
        self, request: Request, namespace: Namespace, tokens: Tokens, forced: Forced
    ) -> Speculation:
        """The speculation of one of the request's sequences, of which `tokens` are the prompt, and
        which has no choice but to go on with what is `forced`.
        """
        return NO_SPECULATION

    def ended(self, namespace: Namespace, tokens: Tokens, prompt_tokens: int) -> None:
        """A sequence has ended: what it has generated stands behind so many tokens."""

    def clear(self, namespace: Namespace | None = None) -> None:
        """Forget what the sequences of a namespace have generated, or of all."""


NO_SPECULATOR = Speculator()

INDEXED_TOKENS = 1 << 15
"""Of a prompt, its last ones: they are sorted between two steps, in some milliseconds."""


class LiveSpeculator(Speculator):
    """Drafts from the tree of `store`, and from what sequences say. Engine thread only."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._answers = Answers()
        self._rates = AcceptanceRates()
        self._prompt: tuple[str, SortedText] = "", SortedText()  # of the latest request

    def begin(
        self, request: Request, namespace: Namespace, tokens: Tokens, forced: Forced
    ) -> Speculation:
        if not request.speculate or request.max_tokens <= 1:
            return NO_SPECULATION
        if self._prompt[0] != request.id:
            self._prompt = request.id, SortedText(request.prompt[-INDEXED_TOKENS:])
        drafter = Drafter(
            self._prompt[1],
            request.prediction,
            partial(self._store.continuation, namespace, tokens),
            partial(self._answers.propose, namespace),
            forced,
        )
        is_guided = request.constraint is not None or request.thinking_budget is not None
        patience = 0 if is_guided else MOST_PATIENCE  # what is forced comes and goes
        return LiveSpeculation(drafter, SequenceRates(self._rates), patience)

    def ended(self, namespace: Namespace, tokens: Tokens, prompt_tokens: int) -> None:
        self._answers.add(namespace, tokens.ids(prompt_tokens, len(tokens)))

    def clear(self, namespace: Namespace | None = None) -> None:
        self._answers.clear(namespace)
