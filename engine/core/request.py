"""From a request to its sequences: what it must satisfy, and what is made of it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from engine.api import InvalidRequest
from engine.constraints.drafted import forced_tokens
from engine.constraints.guide import Guide, GuideFactory
from engine.core.sequence import LiveSequence
from engine.core.step import SequenceId
from engine.drafts.policy import DraftPolicy
from engine.drafts.proposer import Proposer
from engine.output.text import NewOutput
from engine.values.request import Request
from kvstore.tokens import Digest, Tokens
from kvstore.types import DEFAULT_NAMESPACE, Namespace


@dataclass(frozen=True, slots=True)
class Namespaces:
    """Those of one model, which `unsalted` is, and of its adapters, by name.

    An adapter's fingerprint is in the namespace, not its name: a changed one finds nothing.
    """

    unsalted: Namespace = DEFAULT_NAMESPACE
    fingerprints: Mapping[str, str] = field(default_factory=dict)

    def of(self, cache_salt: str, adapter: str) -> Namespace:
        """Of a request. Raises KeyError for an adapter that there is not."""
        fingerprint = self.fingerprints[adapter] if adapter else ""
        return replace(self.unsalted, adapter=fingerprint, cache_salt=cache_salt)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one engine can serve. `arena_tokens` is what one sequence may fill."""

    vocab_size: int
    max_context_tokens: int
    arena_tokens: int
    max_running: int
    max_waiting: int
    step_tokens: int
    step_stretch: float = math.inf  # of a step with prompts, over one of decodes alone
    adapters: frozenset[str] = frozenset()
    pools: bool = False  # whether the model's hidden states can be had

    def __post_init__(self) -> None:
        if self.step_tokens < self.max_running:
            raise ValueError(
                f"step_tokens ({self.step_tokens}) must be at least max_running "
                f"({self.max_running}): every running sequence computes a token in a step"
            )


def step_stretch(prompt_share: float) -> float:
    """How many times as long as one of decodes alone a step is in which prompts have such a share
    of the time.
    """
    return math.inf if prompt_share >= 1 else 1 / (1 - prompt_share)


def validate(request: Request, limits: Limits) -> None:
    """Raise InvalidRequest, naming the field and the limit, unless the request can be served."""
    _validate_prompt(request, limits)
    _validate_pooling(request, limits)
    sampling = request.sampling
    if not 0 <= sampling.min_tokens <= request.max_tokens:
        raise InvalidRequest(
            f"min_tokens is {sampling.min_tokens}; it must be between 0 and max_tokens "
            f"({request.max_tokens})",
            "min_tokens",
        )
    for token_id in sampling.logit_bias:
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidRequest(
                f"logit_bias names token {token_id}; the vocabulary has tokens 0 to "
                f"{limits.vocab_size - 1}",
                "logit_bias",
            )
    _validate_prediction(request.prediction, limits)
    if sampling.top_k < 0:
        raise InvalidRequest(f"top_k is {sampling.top_k}; it must be 0 (off) or more", "top_k")
    if request.adapter and request.adapter not in limits.adapters:
        known = ", ".join(sorted(limits.adapters)) or "none"
        raise InvalidRequest(f"there is no adapter {request.adapter}; there are: {known}", "model")
    if request.n < 1:
        raise InvalidRequest(f"n is {request.n}; it must be at least 1", "n")
    if request.n > limits.max_waiting:
        raise InvalidRequest(
            f"n is {request.n}; at most {limits.max_waiting} sequences may wait", "n"
        )


def _validate_prediction(prediction: Sequence[int], limits: Limits) -> None:
    """A token beyond the vocabulary would be read from beyond the embeddings."""
    if len(prediction) > limits.max_context_tokens:
        raise InvalidRequest(
            f"the prediction has {len(prediction)} tokens; the model's context holds "
            f"{limits.max_context_tokens}",
            "prediction",
        )
    if prediction and not 0 <= min(prediction) <= max(prediction) < limits.vocab_size:
        raise InvalidRequest(
            f"the prediction has a token id outside 0 to {limits.vocab_size - 1}", "prediction"
        )


def _validate_pooling(request: Request, limits: Limits) -> None:
    if request.shared_tokens is not None and request.shared_tokens < 0:
        raise InvalidRequest(
            f"shared_tokens is {request.shared_tokens}; it must be 0 or more", "shared_tokens"
        )
    if request.pooling is None:
        return
    if not limits.pools:
        raise InvalidRequest("this model's hidden states are not to be had", "pooling")
    if request.max_tokens or request.n != 1 or request.prompt_logprobs is not None:
        raise InvalidRequest(
            "a prompt that is pooled is neither answered nor scored: max_tokens must be 0, n 1, "
            "and prompt_logprobs unset",
            "pooling",
        )


def _validate_prompt(request: Request, limits: Limits) -> None:
    prompt_tokens = len(request.prompt)
    if prompt_tokens == 0:
        raise InvalidRequest("the prompt is empty", "prompt")
    if request.max_tokens < 0:
        raise InvalidRequest(
            f"max_tokens is {request.max_tokens}; it must be 0 or more", "max_tokens"
        )
    if not 0 <= min(request.prompt) <= max(request.prompt) < limits.vocab_size:
        raise InvalidRequest(
            f"the prompt has a token id outside 0 to {limits.vocab_size - 1}", "prompt"
        )
    for limit, what in (
        (limits.max_context_tokens, "the model's context"),
        (limits.arena_tokens, "the KV cache"),
    ):
        param = "prompt" if prompt_tokens >= limit else "max_tokens"
        if prompt_tokens + request.max_tokens > limit:
            raise InvalidRequest(
                f"prompt ({prompt_tokens} tokens) and max_tokens ({request.max_tokens}) come to "
                f"more than {what} holds: {limit} tokens",
                param,
            )


@dataclass(frozen=True, slots=True)
class Submission:
    """A valid request, with a prompt and a guide for each of its n sequences."""

    request: Request
    prompts: tuple[Tokens, ...]
    guides: tuple[Guide | None, ...]  # None: no constraint
    block_hashes: tuple[Digest, ...] = ()  # of the prompt, where it may be on disk


def prepare(
    request: Request,
    limits: Limits,
    new_guide: GuideFactory | None = None,
    block_hashes: Callable[[Request], tuple[Digest, ...]] | None = None,
) -> Submission:
    """Check and pack a request, in time proportional to prompt and n. Raises InvalidRequest.

    Without `new_guide` its sequences have no constraint; without `block_hashes` there is no disk
    cache.
    """
    validate(request, limits)
    packed = Tokens(request.prompt)
    return Submission(
        request,
        prompts=tuple(packed.copy() for _ in range(request.n)),
        guides=tuple(None if new_guide is None else new_guide() for _ in range(request.n)),
        block_hashes=() if block_hashes is None else block_hashes(request),
    )


class SequenceFactory:
    """Makes the sequences of requests, and numbers them."""

    def __init__(
        self,
        new_output: NewOutput,
        draw_seed: Callable[[], int],
        namespaces: Namespaces,
        drafts: DraftPolicy | None,
    ) -> None:
        self._new_output = new_output
        self._draw_seed = draw_seed
        self._namespaces = namespaces
        self._drafts = drafts
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
            output = self._new_output(request)
            proposer: Proposer | None = None
            if self._drafts is not None:
                forced = None if guide is None else partial(forced_tokens, guide)
                proposer = self._drafts.begin(request, namespace, tokens, forced)
            sequence = LiveSequence(
                id=SequenceId(next(self._ids)),
                index=index,
                request=request,
                namespace=namespace,
                tokens=tokens,
                output=output,
                seed=base_seed + index,
                stop_token_ids=output.stop_token_ids,
                guide=guide,
                block_hashes=submission.block_hashes,
                first=first,
                proposer=proposer,
            )
            first = first or sequence
            yield sequence
