"""What callers are told of a sequence. Pure functions."""

from engine.output import Piece
from engine.sequence import Sequence
from engine.step import SampledToken
from engine.types import FinishReason, OutputEvent, TokenLogprob, Usage


def admission(sequence: Sequence) -> OutputEvent:
    """It is computed from now on, or will be as soon as its turn comes in a step."""
    return OutputEvent(
        request_id=sequence.request.id,
        index=sequence.index,
        admission=Usage(sequence.prompt_tokens, sequence.cached_tokens, 0),
    )


def token(sequence: Sequence, sampled: SampledToken, piece: Piece) -> OutputEvent:
    """A token that it has taken, with the text that can be shown for it."""
    return OutputEvent(
        request_id=sequence.request.id,
        index=sequence.index,
        text=piece.text,
        token_ids=(sampled.token_id,),
        logprobs=(sampled.logprob,) if sampled.logprob else (),
        prompt_logprobs=_prompt_logprobs(sequence) if sequence.output_tokens == 1 else None,
        finish_reason=piece.finish_reason,
        stopped_by=piece.stopped_by,
        usage=sequence.usage if piece.finish_reason else None,
    )


def end(sequence: Sequence, reason: FinishReason) -> OutputEvent:
    """It has ended without another token."""
    return OutputEvent(
        request_id=sequence.request.id,
        index=sequence.index,
        prompt_logprobs=_prompt_logprobs(sequence) if reason is FinishReason.LENGTH else None,
        finish_reason=reason,
        usage=sequence.usage,
    )


def failure(sequence: Sequence, message: str) -> OutputEvent:
    """It could not be computed."""
    return OutputEvent(
        request_id=sequence.request.id,
        index=sequence.index,
        finish_reason=FinishReason.ERROR,
        usage=sequence.usage,
        error=message,
    )


def _prompt_logprobs(sequence: Sequence) -> tuple[TokenLogprob | None, ...] | None:
    if sequence.request.prompt_logprobs is None:
        return None
    return (None, *sequence.prompt_scores)
