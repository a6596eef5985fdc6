"""From a sequence to what the runner is told of it. Pure functions."""

from engine.scheduling.sequence import LiveSequence
from engine.step.plan import Chunk, Entry, Sampling


def entry(sequence: LiveSequence) -> Entry:
    """The sequence as it enters the batch."""
    params, tokens = sequence.request.sampling, sequence.tokens
    repeats = params.repetition_penalty != 1.0
    penalised = repeats or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    output = tokens.ids(sequence.prompt_tokens, len(tokens)) if penalised else ()
    sampling = Sampling(
        params=params,
        seed=sequence.seed,
        output_index=sequence.output_tokens,
        prompt_tokens=sequence.request.prompt if repeats else (),
        output_tokens=tuple(output),
        banned_tokens=sequence.banned_tokens,
    )
    return Entry(sequence.id, sampling)


def chunk(sequence: LiveSequence, start: int, n_tokens: int) -> Chunk:
    """Tokens of the sequence from position `start` on; samples after its last one."""
    tokens, end = sequence.tokens, start + n_tokens
    scored_end = min(end + 1, sequence.prompt_tokens)
    has_scores = sequence.lacks_scores and start + 1 < scored_end
    return Chunk(
        sequence_id=sequence.id,
        start=start,
        tokens=tuple(tokens.ids(start, end)),
        samples=end == len(tokens) and sequence.request.max_tokens > 0,
        prompt_logprobs=sequence.request.prompt_logprobs if has_scores else None,
        next_tokens=tuple(tokens.ids(start + 1, scored_end)) if has_scores else (),
    )
