"""Checks at load whether a model still predicts well with K and V, or with recurrent states, stored
in less precision than it computes them in.

The model computes one text in full precision and once more with each of the two stored in its
format. The predictions of the next tokens are compared.
"""

from itertools import pairwise
from typing import NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.api import ModelError, Report
from engine.mlx_backend.kv.layout import RUN_ERRORS, Layout
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
from engine.mlx_backend.model.patches import NO_ADAPTER
from engine.values.settings import EngineConfig, KVFormat, StateFormat

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
"""The text that is computed: prose, code, data, a list and other languages."""

_MOST_TOKENS, _FIRST_CHUNK, _DECODED = 192, 96, 8
"""The most tokens of the text; the tokens of its first chunk, whose logits are not read; and its
last tokens, which are computed one by one, as those of answers are.
"""

MOST_DIVERGENCE = {
    KVFormat.F16: 0.01,
    KVFormat.BF16: 0.01,
    KVFormat.Q8: 0.01,
    KVFormat.K8V4: 0.05,
}
"""By format of K and V, the largest mean Kullback-Leibler divergence, in nats for each token, with
which a model is served.

The embedded model, of 3 M parameters, has 0.0013 with q8 and 0.22 with k8v4. Models diverge more if
the channels of their keys differ so much in size that even the rotation of keys does not help.
"""

MOST_STATE_DIVERGENCE = 0.01
"""The largest mean Kullback-Leibler divergence with rounded states. The check rounds them after
every chunk, some of which have one token: far more often than a served model's are rounded.
"""

LogitsVector: TypeAlias = npt.NDArray[np.float32]
"""The logits of one token, by the token that follows it."""


class FormatQuality(NamedTuple):
    """How predictions with less precision compare with those in full precision.

    `divergence`: the mean Kullback-Leibler divergence, in nats for each token. `agreement`: the
    share of tokens after which both find the same token the likeliest.
    """

    divergence: float
    agreement: float

    @property
    def summary(self) -> str:
        """The comparison in words, for a line of the report."""
        return (
            f"KL divergence {self.divergence:.2g} from full precision, "
            f"{self.agreement:.1%} of likeliest tokens the same"
        )


class Divergences(NamedTuple):
    """The model card's `kv_divergence` and `state_divergence`: None where nothing is stored in less
    precision.
    """

    kv: float | None
    state: float | None


def check_formats(
    loaded: LoadedModel, execution: Execution, config: EngineConfig, report: Report
) -> Divergences:
    """Check the formats in which the loaded model stores K and V and saves recurrent states, and
    report each result. Also report a configured format that makes nothing of this model smaller.

    Raises ModelError if a format changes the predictions too much, or the model does not run with
    it.
    """
    layout = loaded.layout
    kv_divergence = state_divergence = None
    if not layout.is_stored_in_full:
        with_kv = layout.stored_as(layout.format)
        setting, most = f"kv_format {layout.format}", MOST_DIVERGENCE[layout.format]
        quality = _check_layout(loaded, execution, with_kv, setting, most)
        report(f"KV cache in {layout.format_in_use}: {quality.summary}")
        kv_divergence = quality.divergence
    elif config.kv_format not in (KVFormat.AUTO, KVFormat.FULL):
        report(
            f"kv_format {config.kv_format} makes none of this model's K and V smaller: all stays "
            "full"
        )
    if layout.rounds_states:
        with_states = layout.stored_as(KVFormat.FULL, layout.state_format)
        setting = f"state_format {layout.state_format}"
        quality = _check_layout(loaded, execution, with_states, setting, MOST_STATE_DIVERGENCE)
        report(f"recurrent states saved in {layout.state_format}: {quality.summary}")
        state_divergence = quality.divergence
    elif config.state_format not in (StateFormat.AUTO, StateFormat.FULL):
        report(
            f"state_format {config.state_format} makes none of this model's states smaller: all "
            "stays full"
        )
    return Divergences(kv_divergence, state_divergence)


def _check_layout(
    loaded: LoadedModel, execution: Execution, layout: Layout, setting: str, most: float
) -> FormatQuality:
    """How the model predicts with a layout other than in full precision.

    Raises ModelError, which names the user's `setting`, for a divergence of more than `most`.
    """
    encoded = loaded.tokenizer.encode(TEXT)
    tokens = [token for token in encoded if token < layout.vocab_size][:_MOST_TOKENS]
    row, steps = _probe(tokens)
    try:
        full = own_logits(loaded.model, execution.adapters, [row], steps)
        stored = logits_through_storage(loaded.model, layout, execution, [row], steps)
    except RUN_ERRORS as failure:
        raise ModelError(
            f"the model does not run with {setting}: {failure}; set it to auto"
        ) from failure
    quality = compare(full, stored.astype(mx.float32))
    if not quality.divergence <= most:
        raise ModelError(
            f"the setting {setting} changes too much of what this model says: on a text of "
            f"{len(tokens)} tokens its predictions differ by a KL divergence of "
            f"{quality.divergence:.3g}, and at most {most} is served; set it to auto, or to a "
            "larger format"
        )
    del full, stored
    mx.clear_cache()  # the check's buffers
    return quality


def compare(full: mx.array, stored: mx.array) -> FormatQuality:
    """Compare logits in full precision with others, both float32 `[tokens, vocabulary]`.

    The sums over the vocabulary are in float64: `mx.logsumexp` in float32 is up to 2.5e-4 too small
    on a CPU, and the divergence of f16 is less than 1e-6.
    """
    n_tokens, divergence, agreement = full.shape[0], 0.0, 0.0
    for at in range(n_tokens):
        expected, found = np.array(full[at]), np.array(stored[at])
        divergence += _divergence(expected, found) / n_tokens
        agreement += (expected.argmax() == found.argmax()) / n_tokens
    return FormatQuality(divergence, agreement)


def _divergence(full: LogitsVector, stored: LogitsVector) -> float:
    """The Kullback-Leibler divergence of one token's predictions, in nats. NaN of logits stays."""
    expected, found = _logprobs(full), _logprobs(stored)
    # A token at minus infinity has no chance, so it adds nothing.
    counted = ~np.isneginf(expected)
    expected, found = expected[counted], found[counted]
    divergence = (np.exp(expected) * (expected - found)).sum()
    return float(np.maximum(divergence, 0))  # rounding may leave less


def _logprobs(logits: LogitsVector) -> npt.NDArray[np.float64]:
    """The logarithms of the probabilities of all tokens."""
    shifted: npt.NDArray[np.float64] = logits.astype(np.float64) - logits.max()
    logprobs: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return logprobs


def format_check_bytes(layout: Layout) -> int:
    """The most memory in bytes that the check of a layout's formats takes, in addition to the
    weights; 0 for a layout without formats to check.
    """
    if layout.is_stored_in_full and not layout.rounds_states:
        return 0
    row, steps = _probe([0] * _MOST_TOKENS)
    layout = layout.within(_MOST_TOKENS)
    stored = footprint(layout, BLOCK_SIZE).storage_bytes(storage_sizes(layout, [row]))
    n_read = sum(chunk.n_read for step in steps for chunk in step)
    # Logits of both, and those of one in float32. They are compared token by token.
    logits_bytes = (_MOST_TOKENS * OWN_LOGIT_BYTES) + 3 * n_read * 4
    return (
        stored.arenas
        + stored.states
        + activation_bytes(_MOST_TOKENS, n_read, layout.vocab_size)
        + logits_bytes * layout.vocab_size
    )


def _probe(tokens: list[int]) -> tuple[Row, list[list[Chunk]]]:
    """The row of a text, and the chunk of each step that computes it."""
    n_tokens = len(tokens)
    decoded = max(n_tokens - _DECODED, 1)
    first = min(_FIRST_CHUNK, decoded - 1)
    bounds = [0, *([first] if first else []), *range(decoded, n_tokens + 1)]
    steps = [
        [Chunk(0, start, stop, stop - start if start or not first else 0)]
        for start, stop in pairwise(bounds)
    ]
    return Row(tokens, NO_ADAPTER), steps
