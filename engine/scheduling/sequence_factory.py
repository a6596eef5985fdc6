"""Makes the sequences of a request."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

from engine.output.output import OutputFactory
from engine.scheduling.sequence import LiveSequence
from engine.scheduling.submission import Submission
from engine.step.plan import SequenceId
from kvstore.types import Namespace


class SequenceFactory:
    """Gives each its id, its seed and what its output is made with."""

    def __init__(
        self, outputs: OutputFactory, draw_seed: Callable[[], int], unsalted: Namespace
    ) -> None:
        self._outputs = outputs
        self._draw_seed = draw_seed
        self._unsalted = unsalted
        self._ids = count()

    def namespace(self, cache_salt: str) -> Namespace:
        return replace(self._unsalted, cache_salt=cache_salt)

    def sequences(self, submission: Submission) -> Iterator[LiveSequence]:
        """The request's n; the seed of each is one more than that of the one before."""
        request = submission.request
        seed = request.sampling.seed
        base_seed = self._draw_seed() if seed is None else seed
        first: LiveSequence | None = None
        for index in range(request.n):
            sequence = LiveSequence(
                id=SequenceId(next(self._ids)),
                index=index,
                request=request,
                namespace=self.namespace(request.cache_salt),
                tokens=submission.prompts[index],
                output=self._outputs.new(request),
                seed=base_seed + index,
                stop_token_ids=self._outputs.stop_token_ids(request),
                guide=submission.guides[index],
                names=submission.names,
                first=first,
            )
            first = first or sequence
            yield sequence
