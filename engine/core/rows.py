"""Describes a sequence to the runner: as it enters the batch, and as rows of its known tokens."""

from engine.core.sequence import LiveSequence
from engine.core.step import BatchEntry, Prefill, Sampling, Score
from engine.values.request import Pooling, Request
from engine.values.tokens import NO_TOKENS, PackedTokens


def batch_entry(sequence: LiveSequence) -> BatchEntry:
    """Describe the sequence to the runner, whose batch it enters."""
    params = sequence.request.sampling
    repeats = params.repetition_penalty != 1.0
    penalised = repeats or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    is_read = penalised or params.bad_words or params.dry is not None
    n_tokens = len(sequence.tokens)
    output = sequence.token_ids(sequence.prompt_tokens, n_tokens) if is_read else ()
    sampling = Sampling(
        params=params,
        seed=sequence.seed,
        output_index=sequence.output_tokens,
        prompt_tokens=_text_tokens(sequence.request) if repeats or params.dry else NO_TOKENS,
        output_tokens=tuple(output),
        banned_tokens=sequence.banned_tokens(),
    )
    request = sequence.request
    return BatchEntry(sequence.id, sampling, request.adapter, request.images)


def _text_tokens(request: Request) -> PackedTokens:
    """The prompt without the tokens that stand for parts of images: these are not repetitions."""
    if not request.images:
        return request.prompt
    parts, end = list[bytes](), 0
    for image in request.images:
        for first, n_tokens in image.runs:
            parts.append(request.prompt[end:first].packed)
            end = first + n_tokens
    return PackedTokens(b"".join((*parts, request.prompt[end:].packed)))


def prefill_row(sequence: LiveSequence, start: int, n_tokens: int) -> Prefill:
    """A row of `n_tokens` known tokens from position `start` on. It samples after the last one."""
    n_known, end = len(sequence.tokens), start + n_tokens
    score = None
    if sequence.lacks_scores and sequence.request.prompt_logprobs is not None:
        scored_end = min(end + 1, sequence.prompt_tokens)
        if start + 1 < scored_end:
            following = tuple(sequence.token_ids(start + 1, scored_end))
            score = Score(following, sequence.request.prompt_logprobs)
    pooling = sequence.request.pooling
    if (pooling is Pooling.LAST and end < n_known) or (pooling is Pooling.FIRST and start > 0):
        pooling = None  # the row does not have the token that is needed
    return Prefill(
        sequence_id=sequence.id,
        start=start,
        tokens=tuple(sequence.token_ids(start, end)),
        samples=end == n_known and sequence.request.max_tokens > 0,
        score=score,
        pooling=pooling,
    )
