"""From a request to its sequences. What takes time is done before, on another thread."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

from engine.constraints.drafted import forced_tokens
from engine.constraints.guide import FreeGuide, Guide, GuideFactory
from engine.drafts.speculator import Speculator
from engine.output.output import OutputFactory
from engine.scheduling.namespaces import Namespaces
from engine.scheduling.sequence import LiveSequence
from engine.scheduling.validation import Limits, validate
from engine.step.plan import SequenceId
from engine.types.request import Request
from kvstore.digest import Digest
from kvstore.tokens import Tokens


@dataclass(frozen=True, slots=True)
class Submission:
    """A valid request, with a prompt and a guide for each of its n sequences."""

    request: Request
    prompts: tuple[Tokens, ...]
    guides: tuple[Guide, ...]
    block_hashes: tuple[Digest, ...] = ()  # of the prompt, where it may be on disk


def no_hashes(request: Request) -> tuple[Digest, ...]:
    """For engines without a disk cache."""
    return ()


def prepare(
    request: Request,
    limits: Limits,
    new_guide: GuideFactory = FreeGuide,
    block_hashes: Callable[[Request], tuple[Digest, ...]] = no_hashes,
) -> Submission:
    """Check and pack a request, in time proportional to prompt and n. Raises InvalidRequest."""
    validate(request, limits)
    packed = Tokens(request.prompt)
    return Submission(
        request,
        prompts=tuple(packed.copy() for _ in range(request.n)),
        guides=tuple(new_guide() for _ in range(request.n)),
        block_hashes=block_hashes(request),
    )


class SequenceFactory:
    """Makes the sequences of requests, and numbers them."""

    def __init__(
        self,
        outputs: OutputFactory,
        draw_seed: Callable[[], int],
        namespaces: Namespaces,
        speculator: Speculator,
    ) -> None:
        self._outputs = outputs
        self._draw_seed = draw_seed
        self._namespaces = namespaces
        self._speculator = speculator
        self._ids = count()

    def sequences(self, submission: Submission) -> Iterator[LiveSequence]:
        """The request's n sequences; their seeds are consecutive."""
        request = submission.request
        seed = request.sampling.seed
        base_seed = self._draw_seed() if seed is None else seed
        first: LiveSequence | None = None
        namespace = self._namespaces.of(request.cache_salt, request.adapter)
        for index in range(request.n):
            tokens, guide = submission.prompts[index], submission.guides[index]
            sequence = LiveSequence(
                id=SequenceId(next(self._ids)),
                index=index,
                request=request,
                namespace=namespace,
                tokens=tokens,
                output=self._outputs.new(request),
                seed=base_seed + index,
                stop_token_ids=self._outputs.stop_token_ids(request),
                guide=guide,
                block_hashes=submission.block_hashes,
                first=first,
                speculation=self._speculator.begin(
                    request, namespace, tokens, partial(forced_tokens, guide)
                ),
            )
            first = first or sequence
            yield sequence
