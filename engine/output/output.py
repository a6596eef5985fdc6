"""From sampled tokens to text, and to the reason why a sequence ends."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.output.detokenizer import Detokenizer
from engine.output.stop import StopChecker
from engine.types.output import FinishReason
from engine.types.request import Request


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that became safe to show, and why the sequence ends with it, if it does."""

    text: str
    finish_reason: FinishReason | None = None
    stopped_by: str | int | None = None  # the stop string, or the stop token's id


class Output:
    """Turns one sequence's tokens into text. `add` is called with every sampled token, in order."""

    __slots__ = ("_detokenizer", "_n_tokens", "_request", "_stop", "_stop_token_ids")

    def __init__(
        self, request: Request, stop_token_ids: frozenset[int], detokenizer: Detokenizer
    ) -> None:
        self._request = request
        self._stop_token_ids = stop_token_ids
        self._detokenizer = detokenizer
        self._stop = StopChecker(request.stop)
        self._n_tokens = 0

    def add(self, token_id: int) -> TextDelta:
        """The text that the token completes. A stop token has none."""
        self._n_tokens += 1
        if token_id in self._stop_token_ids:
            return self._end("", FinishReason.STOP, token_id)
        text = self._detokenizer.add(token_id)
        if self._n_tokens < self._request.sampling.min_tokens:
            return TextDelta(text)  # where a stop string cannot end it
        checked = self._stop.add(text)
        if checked.stopped_by is not None:
            return TextDelta(checked.text, FinishReason.STOP, checked.stopped_by)
        if self._n_tokens < self._request.max_tokens:
            return TextDelta(checked.text)
        return self._end(checked.text, FinishReason.LENGTH)

    def complete(self) -> TextDelta:
        """The rest of the text, where nothing may follow the last token."""
        return self._end("", FinishReason.STOP)

    def _end(self, text: str, reason: FinishReason, stopped_by: int | None = None) -> TextDelta:
        """`text` and all that is still held back, unless a stop string is in it."""
        rest = self._stop.add(self._detokenizer.finish())
        if rest.stopped_by is not None:
            return TextDelta(text + rest.text, FinishReason.STOP, rest.stopped_by)
        return TextDelta(text + rest.text + self._stop.finish(), reason, stopped_by)


class OutputFactory:
    """Makes the Output of each new sequence."""

    def __init__(
        self, eos_token_ids: frozenset[int], new_detokenizer: Callable[[Request], Detokenizer]
    ) -> None:
        self._eos_token_ids = eos_token_ids
        self._new_detokenizer = new_detokenizer

    def stop_token_ids(self, request: Request) -> frozenset[int]:
        """The tokens that end this request."""
        eos = frozenset[int]() if request.ignore_eos else self._eos_token_ids
        return eos | request.stop_token_ids

    def new(self, request: Request) -> Output:
        return Output(request, self.stop_token_ids(request), self._new_detokenizer(request))
