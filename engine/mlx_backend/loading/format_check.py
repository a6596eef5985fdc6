"""The check of a KV format at load: how far is what a model says from what it says with K and V as
it computes them?

A text is fed to the model in both ways, and the predictions of its next tokens are compared.
"""

from itertools import pairwise
from typing import NamedTuple

import mlx.core as mx

from engine.api import ModelError, Report
from engine.mlx_backend.loading.loader import LoadedModel
from engine.mlx_backend.loading.memory import activation_bytes, footprint
from engine.mlx_backend.loading.selfcheck import (
    BLOCK_SIZE,
    OWN_LOGIT_BYTES,
    Chunk,
    Row,
    logits_through_storage,
    own_logits,
    storage_sizes,
)
from engine.mlx_backend.model.cached_model import Execution
from engine.mlx_backend.model.layout import RUN_ERRORS, Layout
from engine.mlx_backend.model.patches import NO_ADAPTER
from engine.values.settings import KVFormat

TEXT = """\
The library of a small town is open from nine to five, and on Thursdays until eight. Its oldest
book is a herbal of 1597, which nobody may take home. "Could I see it?" asked Mr. Okafor, who had
come by train from the coast. "You could," said the librarian, "if you wash your hands first."

def median(numbers: list[float]) -> float:
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2

{"name": "Aberystwyth", "population": 14640, "rivers": ["Rheidol", "Ystwyth"], "twinned": true}

1. Boil the water. 2. Add 200 g of rice and a pinch of salt. 3. Wait for eleven minutes.
Die Brücke wurde 1911 gebaut und ist 38 Meter lang. Le pont a été construit en 1911.
"""
"""Prose, code, data, a list and other languages."""

_MOST_TOKENS, _FIRST_CHUNK, _DECODED = 192, 96, 8
"""Tokens of the text; those of the first chunk, whose logits are not read; and those at the end
that are computed one by one, as answers are.
"""

MOST_DIVERGENCE = {
    KVFormat.F16: 0.01,
    KVFormat.BF16: 0.01,
    KVFormat.Q8: 0.01,
    KVFormat.K8V4: 0.05,
}
"""The largest mean Kullback-Leibler divergence, in nats for each token, with which a format serves.

The embedded model, of 3 M parameters, has 0.0011 with q8 and 0.24 with k8v4. It is more where the
channels of keys differ so much in size that even their rotation does not help.
"""


class FormatQuality(NamedTuple):
    """How predictions with stored K and V compare with those of the model's own, in full precision.

    `divergence`: the mean Kullback-Leibler divergence, in nats for each token. `agreement`: the
    share of tokens for which the same next one is the likeliest.
    """

    divergence: float
    agreement: float


def check_format(
    loaded: LoadedModel, execution: Execution, wanted: KVFormat, report: Report
) -> float | None:
    """The card's `kv_divergence`, of the format in which the loaded model stores K and V; None if
    that is in full, although another may be `wanted`. Reports either.

    Raises ModelError where it is beyond MOST_DIVERGENCE, or the model does not run so.
    """
    layout = loaded.layout
    if layout.is_stored_in_full:
        if wanted not in (KVFormat.AUTO, KVFormat.FULL):
            report(f"kv_format {wanted} changes nothing: K and V cannot be stored so")
        return None
    encoded = loaded.tokenizer.encode(TEXT)
    tokens = [token for token in encoded if token < layout.vocab_size][:_MOST_TOKENS]
    row, steps = _probe(tokens)
    try:
        full = own_logits(loaded.model, execution.adapters, [row], steps)
        stored = logits_through_storage(loaded.model, layout, execution, [row], steps)
    except RUN_ERRORS as failure:
        raise ModelError(
            f"the model does not run with kv_format {layout.format}: {failure}"
        ) from failure
    quality = compare(full, stored.astype(mx.float32))
    most = MOST_DIVERGENCE[layout.format]
    if not quality.divergence <= most:
        raise ModelError(
            f"the setting kv_format is {layout.format}, which changes too much of what this model "
            f"says: on a text of {len(tokens)} tokens its predictions differ by a KL divergence of "
            f"{quality.divergence:.3g}, and at most {most} is served; set it to "
            "auto, or to a larger format"
        )
    report(
        f"KV cache in {layout.format_in_use}: KL divergence {quality.divergence:.2g} from full "
        f"precision, {quality.agreement:.1%} of likeliest tokens the same"
    )
    del full, stored
    mx.clear_cache()  # the check's buffers
    return quality.divergence


def compare(full: mx.array, stored: mx.array) -> FormatQuality:
    """Compare logits, both float32 `[tokens, vocabulary]`."""
    expected = full - mx.logsumexp(full, axis=-1, keepdims=True)
    found = stored - mx.logsumexp(stored, axis=-1, keepdims=True)
    # What the model rules out, at minus infinity, counts nothing.
    terms = mx.where(mx.isfinite(expected), mx.exp(expected) * (expected - found), 0)
    same = mx.argmax(full, axis=-1) == mx.argmax(stored, axis=-1)
    return FormatQuality(float(terms.sum(axis=-1).mean()), float(same.mean()))


def format_check_bytes(layout: Layout) -> int:
    """The memory that the check of a layout's format takes at most, in addition to the weights; 0
    if there is none.
    """
    if layout.is_stored_in_full:
        return 0
    row, steps = _probe([0] * _MOST_TOKENS)
    layout = layout.within(_MOST_TOKENS)
    stored = footprint(layout, BLOCK_SIZE).storage_bytes(storage_sizes(layout, [row]))
    n_read = sum(chunk.n_read for step in steps for chunk in step)
    # Logits of both, and two arrays made of each where they are compared.
    logits_bytes = (_MOST_TOKENS * OWN_LOGIT_BYTES) + 6 * n_read * 4
    return (
        stored.arenas
        + stored.states
        + activation_bytes(_MOST_TOKENS, n_read, layout.vocab_size)
        + logits_bytes * layout.vocab_size
    )


def _probe(tokens: list[int]) -> tuple[Row, list[list[Chunk]]]:
    """The row of a text, and the steps that compute it."""
    n_tokens = len(tokens)
    decoded = max(n_tokens - _DECODED, 1)
    first = min(_FIRST_CHUNK, decoded - 1)
    bounds = [0, *([first] if first else []), *range(decoded, n_tokens + 1)]
    steps = [
        [Chunk(0, start, stop, stop - start if start or not first else 0)]
        for start, stop in pairwise(bounds)
    ]
    return Row(tokens, NO_ADAPTER), steps
