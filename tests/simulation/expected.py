"""What requests must generate, computed without an engine."""

from dataclasses import dataclass

import numpy as np

from engine.grammar.state import Complete
from engine.values.output import FinishReason
from engine.values.request import Pooling, Request, ThinkingBudget
from tests.simulation.grammars import follow, ruled_out
from tests.simulation.model import (
    ROOT,
    chain,
    fingerprint,
    pooled_number,
    read_ids,
    sample,
    text_of,
)


@dataclass(frozen=True, slots=True)
class Expected:
    """What one sequence must say when nothing goes wrong."""

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    pooled: bytes = b""


def expected(
    request: Request, seed: int, vocab_size: int, stop_token_ids: frozenset[int]
) -> Expected:
    """Generate without a cache, without neighbours, one token after another."""
    generated, past, adapter = list[int](), [ROOT], fingerprint(request.adapter)
    for token_id in read_ids(request):
        past.append(chain(past[-1], token_id, adapter))
    kv = past[-1]
    while len(generated) < request.max_tokens:
        banned = stop_token_ids if len(generated) < request.sampling.min_tokens else frozenset()
        out = ruled_out(follow(request, generated, vocab_size), banned, vocab_size)
        token_id = sample(kv, seed, len(generated), vocab_size, out)
        token_id = forced(request.thinking_budget, generated, token_id)
        generated.append(token_id)
        kv = chain(kv, token_id, adapter)
        if token_id in stop_token_ids:
            return Expected(generated, text_of(generated[:-1]), FinishReason.STOP)
        text = text_of(generated)
        searched = len(text_of(generated[: max(request.sampling.min_tokens - 1, 0)]))
        cuts = [text.find(stop, searched) for stop in request.stop if stop in text[searched:]]
        if cuts:
            return Expected(generated, text[: min(cuts)], FinishReason.STOP)
        said = follow(request, generated, vocab_size)
        if isinstance(said, Complete):
            return Expected(generated, text, FinishReason.STOP)
    pooled = _pooled(request, past[1:])
    return Expected(generated, text_of(generated), FinishReason.LENGTH, pooled)


def _pooled(request: Request, kv: list[int]) -> bytes:
    numbers = np.array([pooled_number(own) for own in kv], np.float32)
    match request.pooling:
        case None:
            return b""
        case Pooling.LAST:
            vector = numbers[-1:]
        case Pooling.FIRST:
            vector = numbers[:1]
        case Pooling.MEAN:
            vector = numbers.sum(keepdims=True) / np.float32(len(numbers))
    return vector.astype("<f4").tobytes()


def forced(budget: ThinkingBudget | None, generated: list[int], token_id: int) -> int:
    """The token, or in its place the next of an end marker that a budget forces.

    The block is open from the start, and is the only one.
    """
    if budget is None:
        return token_id
    marker = list(budget.end)
    block = generated[: budget.tokens]
    ended = any(block[at : at + len(marker)] == marker for at in range(len(block)))
    begun = max(n for n in range(len(marker)) if block[len(block) - n :] == marker[:n])
    place = len(generated) - budget.tokens + begun
    return marker[place] if not ended and begun <= place < len(marker) else token_id
