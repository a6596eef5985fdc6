"""The output of a request as it is generated. Frozen values."""

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # an end-of-sequence token, a stop string or a grammar that is fulfilled
    LENGTH = "length"  # max_tokens or the context length
    REPETITION = "repetition"  # it repeated itself without end
    ABORT = "abort"  # the client left, or the daemon stopped
    ERROR = "error"  # the step that computed it raised, or the loop has died


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its log-probability (natural logarithm) and the best alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens counted for one sequence."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    accepted_draft_tokens: int = 0  # of the completion: drafted before they were sampled
    rejected_draft_tokens: int = 0


@dataclass(slots=True)
class OutputEvent:
    """An event of one sequence: the tokens of a step, the text they complete, or its end.

    `text` may be empty while a character or a possible stop string is incomplete. Exactly one
    event of each sequence has a `finish_reason`; it is the last. One has an `admission`, before all
    that have tokens; a sequence that ends while it waits has none. Prompt logprobs come in parts,
    each entry once, before the first token; the prompt's first token has None. The scheduler sends
    them once a request, with the sequence that was scored: they are for all of its sequences.
    """

    request_id: str
    index: int  # which of the request's n sequences
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()  # the next part, in order
    pooled: bytes = b""  # with pooling and LENGTH: the vector, little-endian float32
    finish_reason: FinishReason | None = None
    stopped_by: str | int | None = None  # with STOP: the stop string, or the stop token's id
    admission: Usage | None = None  # prompt and cached tokens, when it is first admitted
    read_tokens: int | None = None  # of the prompt, computed or cached; see `reports_progress`
    usage: Usage | None = None  # with finish_reason
    error: str | None = None  # with FinishReason.ERROR
    param: str | None = None  # with `error`: the request's field at fault, where it is the request
