"""Checks requests against the engine's limits, and makes their sequences."""

from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count

import numpy as np

from engine.api import InvalidRequest
from engine.core.drafting import DraftPolicy
from engine.core.sequence import LiveSequence
from engine.core.step import Limits, SequenceId
from engine.disk_cache.cache import DiskCache
from engine.drafts.suffix_index import RequestTexts, index_texts
from engine.grammar.state import GrammarPlan, GrammarState, forced_tokens
from engine.output.text import NewOutput
from engine.values.images import Image
from engine.values.request import Request, SamplingParams
from engine.values.tokens import PackedTokens
from kvstore.tokens import Digest, Tokens, content_ids
from kvstore.types import DEFAULT_NAMESPACE, Namespace


@dataclass(frozen=True, slots=True)
class Namespaces:
    """The namespaces of one model and its adapters. `unsalted` is the model's own.

    `fingerprints` has the adapters' fingerprints by name. A namespace contains the fingerprint, so
    that an adapter that has changed under its name finds nothing in the cache.
    """

    unsalted: Namespace = DEFAULT_NAMESPACE
    fingerprints: Mapping[str, str] = field(default_factory=dict)

    def of(self, cache_salt: str, adapter: str) -> Namespace:
        """The namespace of a request's prefix. Raises KeyError for an unknown adapter."""
        fingerprint = self.fingerprints[adapter] if adapter else ""
        return replace(self.unsalted, adapter=fingerprint, cache_salt=cache_salt)


def validate(request: Request, limits: Limits) -> None:
    """Raise InvalidRequest, naming the field and the limit, unless the request can be served."""
    problems = chain(
        _token_problems(request, limits),
        _option_problems(request, limits),
        _image_problems(request, limits),
        _named_token_problems(request.sampling, limits),
    )
    problem = next(problems, None)
    if problem is not None:
        raise InvalidRequest(*problem)


def _token_problems(request: Request, limits: Limits) -> Iterator[tuple[str, str]]:
    """The problems of the request's tokens and their number: messages and field names."""
    n_prompt, n_prediction = len(request.prompt), len(request.prediction)
    if n_prompt == 0:
        yield "the prompt is empty", "prompt"
    if request.max_tokens < 0:
        yield f"max_tokens is {request.max_tokens}; it must be 0 or more", "max_tokens"
    for name, token_ids in ("prompt", request.prompt), ("prediction", request.prediction):
        # The embedding of a token outside the vocabulary would be read out of bounds.
        if token_ids and np.frombuffer(token_ids.packed, np.uint32).max() >= limits.vocab_size:
            yield f"the {name} has a token id outside 0 to {limits.vocab_size - 1}", name
    n_images = sum(image.n_tokens for image in request.images)
    of_images = f", {n_images} of them of images" if n_images else ""
    for limit, what in (
        (limits.max_context_tokens, "the model's context"),
        (limits.arena_tokens, "the KV cache"),
    ):
        if n_prompt + request.max_tokens > limit:
            yield (
                f"prompt ({n_prompt} tokens{of_images}) and max_tokens ({request.max_tokens}) come "
                f"to more than {what} holds: {limit} tokens",
                "prompt" if n_prompt >= limit else "max_tokens",
            )
    if n_prediction > limits.max_context_tokens:
        yield (
            f"the prediction has {n_prediction} tokens; the model's context holds "
            f"{limits.max_context_tokens}",
            "prediction",
        )


def _option_problems(request: Request, limits: Limits) -> Iterator[tuple[str, str]]:
    """The problems of the request's other fields: messages and field names."""
    sampling, shared_tokens = request.sampling, request.shared_tokens
    if shared_tokens is not None and shared_tokens < 0:
        yield f"shared_tokens is {shared_tokens}; it must be 0 or more", "shared_tokens"
    if request.pooling is not None:
        if not limits.pools:
            yield "this model's hidden states cannot be read", "pooling"
        if request.max_tokens or request.n != 1 or request.prompt_logprobs is not None:
            yield (
                "a prompt that is pooled is neither answered nor scored: max_tokens must be 0, "
                "n 1, and prompt_logprobs unset",
                "pooling",
            )
    if request.pin and (not request.is_background or request.max_tokens or request.n != 1):
        yield "only a background request with max_tokens 0 and n 1 can be pinned", "pin"
    if not 0 <= sampling.min_tokens <= request.max_tokens:
        yield (
            f"min_tokens is {sampling.min_tokens}; it must be between 0 and max_tokens "
            f"({request.max_tokens})",
            "min_tokens",
        )
    if sampling.top_k < 0:
        yield f"top_k is {sampling.top_k}; it must be 0 (off) or more", "top_k"
    if request.adapter and request.adapter not in limits.adapters:
        known = ", ".join(sorted(limits.adapters)) or "none"
        yield f"there is no adapter {request.adapter}; there are: {known}", "model"
    if request.n < 1:
        yield f"n is {request.n}; it must be at least 1", "n"
    if request.n > limits.max_waiting:
        yield f"n is {request.n}; at most {limits.max_waiting} sequences may wait", "n"


def _image_problems(request: Request, limits: Limits) -> Iterator[tuple[str, str]]:
    """The problems of the images and of the tokens that stand for them: messages and field names.

    The last token of a prompt is computed with the decodes, which read no features. So it stands
    for no image.
    """
    if not request.images:
        return
    if limits.images is None:
        yield "this model takes no images", "images"
        return
    n_prompt, end, part_id = len(request.prompt), 0, limits.images.part_id
    prompt = np.frombuffer(request.prompt.packed, np.uint32)
    for number, image in enumerate(request.images, start=1):
        if not image.runs or any(n_tokens < 1 for _, n_tokens in image.runs):
            yield f"image {number} has a run of no tokens", "images"
            return
        for first, n_tokens in image.runs:
            if first < end or first + n_tokens > n_prompt:
                yield (
                    f"image {number} has tokens {first} to {first + n_tokens - 1}: they must come "
                    f"after those before, of which the last is {end - 1}, and within the prompt "
                    f"({n_prompt} tokens)",
                    "images",
                )
                return
            end = first + n_tokens
            if (prompt[first:end] != part_id).any():
                yield (
                    f"image {number} has tokens {first} to {end - 1}, and not all of them are the "
                    f"token {part_id}, which stands for parts of images",
                    "images",
                )
        if image.n_tokens > limits.images.max_tokens:
            yield (
                f"image {number} has {image.n_tokens} tokens; this model's have at most "
                f"{limits.images.max_tokens}",
                "images",
            )
        n_whole = image.stop - image.start
        if image.is_whole and n_whole > limits.step_tokens:
            yield (
                f"image {number} has {n_whole} tokens that see each other; a step computes "
                f"{limits.step_tokens} (step_tokens)",
                "images",
            )
    if end == n_prompt:
        yield "the prompt ends with an image; at least one token must follow it", "images"
    if request.prompt_logprobs is not None and any(image.is_whole for image in request.images):
        yield (
            "the log-probabilities of a prompt cannot be computed with this model's images, whose "
            "tokens see each other",
            "prompt_logprobs",
        )


def _named_token_problems(sampling: SamplingParams, limits: Limits) -> Iterator[tuple[str, str]]:
    """The problems of the tokens that the sampling names: messages and field names."""
    named_tokens: tuple[tuple[str, Collection[int]], ...] = (
        ("logit_bias", sampling.logit_bias),
        ("allowed_token_ids", sampling.allowed_token_ids or ()),
        ("bad_words", tuple(chain.from_iterable(sampling.bad_words))),
        ("logprob_token_ids", sampling.logprob_token_ids),
    )
    for name, token_ids in named_tokens:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < limits.vocab_size:
            outside = min(token_ids) if min(token_ids) < 0 else max(token_ids)
            yield (
                f"{name} has token {outside}; the vocabulary has tokens 0 to "
                f"{limits.vocab_size - 1}",
                name,
            )
    if sampling.allowed_token_ids is not None and not sampling.allowed_token_ids:
        yield "allowed_token_ids is empty: no token could be sampled", "allowed_token_ids"
    if not all(sampling.bad_words):
        yield "bad_words has a word without tokens", "bad_words"
    if sampling.logprob_token_ids and sampling.top_logprobs is None:
        yield "logprob_token_ids needs top_logprobs, which may be 0", "logprob_token_ids"


def cache_tokens(prompt: PackedTokens, images: Sequence[Image] = ()) -> Tokens:
    """The ids under which a prompt's KV is cached: those of its tokens, and for parts of images the
    ids of that content. Takes time proportional to the images.
    """
    parts = list[tuple[int, bytes]]()
    for image in images:
        named = array("Q", content_ids(image.digest, image.n_tokens))
        for first, n_tokens in image.runs:
            parts.append((first, named[:n_tokens].tobytes()))
            named = named[n_tokens:]
    wholes = [(image.start, image.stop) for image in images if image.is_whole]
    return Tokens(text=prompt.packed, parts=parts, wholes=wholes)


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A valid request, and what its n sequences share.

    `tokens` are those of the prompt. Without a `plan` its sequences have no constraint.
    `block_hashes` are those of the prompt's blocks, if there is a disk cache. Without `texts`
    nothing is drafted.
    """

    request: Request
    tokens: Tokens
    plan: GrammarPlan | None
    block_hashes: Sequence[Digest]
    texts: RequestTexts | None


@dataclass(slots=True)
class SequenceFactory:
    """Makes the sequences of requests, and numbers them. Without `drafts` nothing is drafted,
    without `disk` no blocks have hashes.
    """

    limits: Limits
    new_output: NewOutput
    draw_seed: Callable[[], int]
    namespaces: Namespaces
    disk: DiskCache | None
    drafts: DraftPolicy | None
    _ids: Iterator[int] = field(default_factory=count, init=False)

    def prepare(self, request: Request, plan: GrammarPlan | None) -> PreparedRequest:
        """Check a request, and compute what depends on the lengths of its texts, in time
        proportional to them. Raises InvalidRequest. On any thread. Without a `plan` it has no
        constraint.
        """
        validate(request, self.limits)
        tokens = cache_tokens(request.prompt, request.images)
        hashes: Sequence[Digest] = ()
        if self.disk is not None:
            namespace = self.namespaces.of(request.cache_salt, request.adapter)
            hashes = self.disk.block_hashes(namespace, tokens.packed(0, len(tokens)))
        texts = None if self.drafts is None else index_texts(request, tokens)
        return PreparedRequest(request, tokens, plan, hashes, texts)

    def sequences(self, prepared: PreparedRequest) -> Iterator[LiveSequence]:
        """Make the request's n sequences, with consecutive seeds."""
        request = prepared.request
        seed = request.sampling.seed
        base_seed = self.draw_seed() if seed is None else seed
        namespace = self.namespaces.of(request.cache_salt, request.adapter)
        first: LiveSequence | None = None
        for index in range(request.n):
            tokens = prepared.tokens.copy()
            grammar = None if prepared.plan is None else GrammarState(prepared.plan)
            sequence = LiveSequence(
                id=SequenceId(next(self._ids)),
                index=index,
                request=request,
                namespace=namespace,
                tokens=tokens,
                output=self.new_output(request),
                seed=base_seed + index,
                grammar=grammar,
                block_hashes=prepared.block_hashes,
                first=first,
            )
            if self.drafts is not None and prepared.texts is not None:
                forced = None if grammar is None else partial(forced_tokens, grammar)
                sequence.proposer = self.drafts.begin(prepared.texts, namespace, tokens, forced)
            first = first or sequence
            yield sequence
