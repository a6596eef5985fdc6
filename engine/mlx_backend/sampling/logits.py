"""Changes to logits that sampling asks for: pure functions, float32 [rows, vocab] to the same.

Each takes the orders of exactly its rows and assumes that all of them ask for the change; what
it does to a row depends on that row alone. Tokens that are ruled out become -inf.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b

import mlx.core as mx

from engine.step import SampleOrder

SHORT_LIST_TOKENS = 1024
"""With top_k up to this, the candidates are selected before they are sorted."""

LOWEST = mx.finfo(mx.float32).min
"""Below every finite logit, above every token that is ruled out."""


def add_bias(logits: mx.array, orders: Sequence[SampleOrder]) -> mx.array:
    """Add each token's logit_bias; ids outside the vocabulary have no logit and are passed over."""
    vocabulary = range(logits.shape[-1])
    biases = [
        {token: bias for token, bias in order.params.logit_bias.items() if token in vocabulary}
        for order in orders
    ]
    values = _vector(value for bias in biases for value in bias.values())
    return logits.at[_places(biases)].add(values)


def penalize_repetition(logits: mx.array, orders: Sequence[SampleOrder]) -> mx.array:
    """Divide positive logits of tokens seen, multiply negative ones (CTRL, arXiv:1909.05858)."""
    rows, tokens = _places([{*order.prompt_tokens, *order.output_tokens} for order in orders])
    penalty = _vector(order.params.repetition_penalty for order in orders)[rows]
    seen = logits[rows, tokens]
    return _replaced(logits, rows, tokens, mx.where(seen > 0, seen / penalty, seen * penalty))


def penalize_presence(logits: mx.array, orders: Sequence[SampleOrder]) -> mx.array:
    """Subtract presence_penalty once from each token of the output."""
    rows, tokens = _places([set(order.output_tokens) for order in orders])
    penalty = _vector(order.params.presence_penalty for order in orders)[rows]
    return _replaced(logits, rows, tokens, logits[rows, tokens] - penalty)


def penalize_frequency(logits: mx.array, orders: Sequence[SampleOrder]) -> mx.array:
    """Subtract frequency_penalty for each occurrence of a token in the output."""
    rows, tokens = _places([order.output_tokens for order in orders])
    penalty = _vector(order.params.frequency_penalty for order in orders)[rows]
    return logits.at[rows, tokens].subtract(penalty)


def ban(logits: mx.array, orders: Sequence[SampleOrder]) -> mx.array:
    """Rule out the banned tokens; ids outside the vocabulary are ruled out anyway."""
    vocabulary = range(logits.shape[-1])
    rows, tokens = _places(
        [[token for token in order.banned_tokens if token in vocabulary] for order in orders]
    )
    return _replaced(logits, rows, tokens, mx.array(-math.inf))


@mx.compile
def keep_allowed(logits: mx.array, bits: mx.array) -> mx.array:
    """Rule out all tokens but those of each row's mask: `bits`, uint32 [rows, ceil(vocab / 32)],
    token t at bit t % 32, from the lowest, of word t // 32.

    Compiled: one pass over the logits, where single operations take a dozen times as long.
    """
    rows, vocab_size = logits.shape
    allowed = (bits[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
    return mx.where(allowed.reshape(rows, -1)[:, :vocab_size], logits, -math.inf)


def temper(logits: mx.array, orders: Sequence[SampleOrder]) -> mx.array:
    """Divide by the temperature, after a shift that makes each row's largest logit 0.

    The shift changes no probability and keeps a small temperature from overflowing.
    """
    temperature = _vector(order.params.temperature for order in orders)[:, None]
    return (logits - logits.max(axis=-1, keepdims=True)) / temperature


def keep_short_list(logits: mx.array, orders: Sequence[SampleOrder]) -> mx.array:
    """top_k of at most SHORT_LIST_TOKENS, then top_p among those. Expects tempered logits."""
    width = min(SHORT_LIST_TOKENS, logits.shape[-1])
    return _keep_head(logits, _descending(mx.topk(logits, width, axis=-1)), orders)


def keep_head(logits: mx.array, orders: Sequence[SampleOrder]) -> mx.array:
    """top_k of any size, then top_p among those. Expects tempered logits."""
    return _keep_head(logits, _descending(logits), orders)


def keep_likely(logits: mx.array, orders: Sequence[SampleOrder]) -> mx.array:
    """Rule out tokens less than min_p times as likely as the likeliest. Expects tempered logits."""
    threshold = _vector(math.log(order.params.min_p) for order in orders)[:, None]
    return mx.where(logits >= threshold, logits, -math.inf)


def add_gumbel_noise(logits: mx.array, orders: Sequence[SampleOrder]) -> mx.array:
    """Make the argmax a draw from the softmax (the Gumbel-max trick, arXiv:1411.0030).

    Each row has a key of its own, so its noise is the same in any batch.
    """
    keys = mx.array([_key(order) for order in orders], dtype=mx.uint32)
    vocab_size = logits.shape[-1]
    noise = mx.vmap(lambda key: mx.random.gumbel((vocab_size,), key=key))(keys)
    # The generator may return -inf, which must not rule out the only token that is left.
    return logits + mx.maximum(noise, LOWEST)


def _keep_head(logits: mx.array, ranked: mx.array, orders: Sequence[SampleOrder]) -> mx.array:
    """Keep as many of the largest logits as top_k and top_p leave; `ranked` is [rows, width]."""
    width = ranked.shape[-1]
    top_k = mx.array([min(order.params.top_k or width, width) for order in orders])[:, None]
    mass = mx.where(mx.arange(width) < top_k, mx.exp(ranked), 0)
    # A token stays while the mass before it is short of top_p; 1 is off, whatever the rounding.
    top_p = _vector(p if (p := order.params.top_p) < 1 else math.inf for order in orders)[:, None]
    enough = top_p * mass.sum(axis=-1, keepdims=True)
    short = mx.cumsum(mass, axis=-1, inclusive=False) < enough
    kept_tokens = mx.minimum(short.sum(axis=-1, keepdims=True), top_k)
    return _keep_largest(logits, ranked, mx.maximum(kept_tokens, 1))


def _keep_largest(logits: mx.array, ranked: mx.array, kept_tokens: mx.array) -> mx.array:
    """Keep the given number [rows, 1] of logits; of equal ones those with the lowest ids."""
    smallest = mx.take_along_axis(ranked, kept_tokens - 1, axis=-1)
    larger = logits > smallest
    equal = logits == smallest
    places_left = kept_tokens - larger.sum(axis=-1, keepdims=True)
    first = mx.cumsum(equal.astype(mx.int32), axis=-1) <= places_left
    return mx.where(larger | (equal & first), logits, -math.inf)


def _descending(values: mx.array) -> mx.array:
    return -mx.sort(-values, axis=-1)


def _key(order: SampleOrder) -> tuple[int, int]:
    """The random key of one draw: a digest of the seed, modulo 2^64, and the output index."""
    draw = (order.seed % 2**64).to_bytes(8, "little") + order.output_index.to_bytes(8, "little")
    digest = blake2b(draw, digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def _places(tokens_by_row: Sequence[Collection[int]]) -> tuple[mx.array, mx.array]:
    """Row indices and token ids of some tokens in each row."""
    rows = [row for row, tokens in enumerate(tokens_by_row) for _ in tokens]
    token_ids = [token for tokens in tokens_by_row for token in tokens]
    return mx.array(rows, dtype=mx.uint32), mx.array(token_ids, dtype=mx.uint32)


def _replaced(logits: mx.array, rows: mx.array, tokens: mx.array, values: mx.array) -> mx.array:
    replaced = mx.array(logits)  # assignment changes the array object, which is the caller's
    replaced[rows, tokens] = values
    return replaced


def _vector(values: Iterable[float]) -> mx.array:
    return mx.array(list(values), dtype=mx.float32)
