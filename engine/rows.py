"""From a sequence to its row of a step. Pure functions."""

from engine.sequence import LiveSequence, held_lease
from engine.step import Row, SampleOrder


def next_row(sequence: LiveSequence, n_tokens: int) -> Row:
    """The next `n_tokens` tokens of a running sequence; samples after its last one."""
    start, tokens = sequence.computed_tokens, sequence.tokens
    end = start + n_tokens
    lease = held_lease(sequence)
    is_last = end == len(tokens) and sequence.request.max_tokens > 0
    scored_end = min(end + 1, sequence.prompt_tokens)
    has_scores = sequence.lacks_scores and start + 1 < scored_end
    return Row(
        sequence_id=sequence.id,
        start=start,
        tokens=tokens.ids(start, end),
        blocks=lease.table,
        holds=lease.holds,
        sample=_sample_order(sequence) if is_last else None,
        prompt_logprobs=sequence.request.prompt_logprobs if has_scores else None,
        next_tokens=tokens.ids(start + 1, scored_end) if has_scores else (),
    )


def _sample_order(sequence: LiveSequence) -> SampleOrder:
    params, tokens = sequence.request.sampling, sequence.tokens
    repeats = params.repetition_penalty != 1.0
    penalised = repeats or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    masked = sequence.guide.choice is not None
    return SampleOrder(
        params=params,
        seed=sequence.seed,
        output_index=sequence.output_tokens,
        prompt_tokens=sequence.request.prompt if repeats else (),
        output_tokens=tokens.ids(sequence.prompt_tokens, len(tokens)) if penalised else (),
        banned_tokens=() if masked else sequence.banned_tokens,
        masked=masked,
    )
