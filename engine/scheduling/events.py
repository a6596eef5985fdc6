"""The output events of a sequence. Pure functions."""

from engine.constraints.matcher import Matcher, Refused, Unanswerable
from engine.output.output import TextDelta
from engine.scheduling.sequence import LiveSequence
from engine.step.plan import SampledToken
from engine.types.output import FinishReason, OutputEvent, TokenLogprob, Usage


def admission(sequence: LiveSequence) -> OutputEvent:
    """It has been admitted for the first time."""
    return OutputEvent(
        request_id=sequence.request.id,
        index=sequence.index,
        admission=Usage(sequence.prompt_tokens, sequence.cached_tokens, 0),
    )


def prompt_logprobs(sequence: LiveSequence, part: tuple[TokenLogprob | None, ...]) -> OutputEvent:
    """The next entries of its prompt's log-probabilities."""
    return OutputEvent(request_id=sequence.request.id, index=sequence.index, prompt_logprobs=part)


def token(sequence: LiveSequence, sampled: SampledToken, delta: TextDelta) -> OutputEvent:
    """A token that it has generated, with the text that it completes."""
    return OutputEvent(
        request_id=sequence.request.id,
        index=sequence.index,
        text=delta.text,
        token_ids=(sampled.token_id,),
        logprobs=(sampled.logprob,) if sampled.logprob else (),
        finish_reason=delta.finish_reason,
        stopped_by=delta.stopped_by,
        usage=sequence.usage if delta.finish_reason else None,
    )


def end(sequence: LiveSequence, reason: FinishReason) -> OutputEvent:
    """It has ended without another token."""
    return OutputEvent(
        request_id=sequence.request.id,
        index=sequence.index,
        pooled=_pooled(sequence) if reason is FinishReason.LENGTH else b"",
        finish_reason=reason,
        usage=sequence.usage,
    )


def failure(sequence: LiveSequence, message: str) -> OutputEvent:
    """It could not be computed."""
    return OutputEvent(
        request_id=sequence.request.id,
        index=sequence.index,
        finish_reason=FinishReason.ERROR,
        usage=sequence.usage,
        error=message,
    )


def refusal(sequence: LiveSequence, matcher: Matcher) -> OutputEvent:
    """It cannot follow its grammar any further. Where that is not the grammar's fault, the event
    names no field of the request.
    """
    assert isinstance(matcher.answer, Refused | Unanswerable)
    return OutputEvent(
        request_id=sequence.request.id,
        index=sequence.index,
        finish_reason=FinishReason.ERROR,
        usage=sequence.usage,
        error=f"{matcher.param}: {matcher.answer.error}",
        param=matcher.param if isinstance(matcher.answer, Refused) else None,
    )


def _pooled(sequence: LiveSequence) -> bytes:
    return b"" if sequence.vector is None else sequence.vector.astype("<f4").tobytes()
