"""Exceptions in the code that runs on the host for one sequence: its text, its grammar's state, its
drafts, the look-up of its prompt on disk, and the description of its rows.
"""

from collections.abc import Callable, Sequence
from typing import overload

from engine.core.sequence import LiveSequence
from engine.drafts.sources import Draft
from engine.grammar.state import Choice, GrammarState
from engine.output.text import Detokenizer
from kvstore.tokens import Digest, PackedDigests, Tokens
from tests.simulation.fake_runner import InjectedError

Fault = Callable[[], None]
"""Raises now and then, in the code of the sequence that it belongs to."""


class InjectedPanic(BaseException):
    """What a library in Rust raises when it panics: no Exception."""


class FaultyDetokenizer:
    """A detokenizer that may raise."""

    def __init__(self, detokenizer: Detokenizer, fault: Fault) -> None:
        self._detokenizer = detokenizer
        self._fault = fault

    def add(self, token_id: int) -> str:
        self._fault()
        return self._detokenizer.add(token_id)

    def finish(self) -> str:
        self._fault()
        return self._detokenizer.finish()


class FaultyTokens(Tokens):
    """Tokens that may raise when rows are made of them."""

    fault: Fault

    def ids(self, start: int, stop: int) -> list[int]:
        self.fault()
        return super().ids(start, stop)


class FaultyHashes(PackedDigests):
    """Hashes of a prompt's blocks that may raise when the prompt is looked up on disk."""

    fault: Fault

    @overload
    def __getitem__(self, index: int) -> Digest: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Digest, ...]: ...

    def __getitem__(self, index: int | slice) -> Digest | tuple[Digest, ...]:
        self.fault()
        return super().__getitem__(index)


class FaultyState(GrammarState):
    """A grammar's state that may raise."""

    def __init__(self, state: GrammarState, fault: Fault) -> None:
        self.__dict__.update(state.__dict__)
        self.fault = fault

    @property
    def choice(self) -> Choice:
        self.fault()
        return super().choice

    def accept(self, token_id: int) -> None:
        self.fault()
        super().accept(token_id)

    def advance(self) -> None:
        self.fault()
        super().advance()


class FaultyDrafter:
    """A source of drafts that may raise."""

    def __init__(
        self, make_draft: Callable[[Sequence[int], int], Draft | None], fault: Fault
    ) -> None:
        self._make_draft = make_draft
        self._fault = fault

    def __call__(self, output: Sequence[int], most: int) -> Draft | None:
        self._fault()
        return self._make_draft(output, most)


def make_faulty(sequence: LiveSequence, fault: Fault) -> None:
    """Have the code of a sequence that has just been queued raise now and then."""
    sequence.output._detokenizer = FaultyDetokenizer(sequence.output._detokenizer, fault)
    plain = sequence.tokens
    sequence.tokens = tokens = FaultyTokens((), plain.text, plain._parts, plain.wholes)
    # Not at its first row: `FairAdmission` takes it that a sequence that starts has had its turn.
    tokens.fault = lambda: fault() if sequence.pending is not None else None
    if sequence.block_hashes:
        sequence.block_hashes = hashes = FaultyHashes(sequence.block_hashes)
        hashes.fault = fault
    if sequence.grammar is not None:
        sequence.grammar = FaultyState(sequence.grammar, fault)


def raise_injected(draw: float) -> None:
    """Raise an error or a panic, half of the time each."""
    raise InjectedError("injected") if draw < 0.5 else InjectedPanic("injected")
