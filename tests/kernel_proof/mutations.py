"""Known faults that are put into the text: each must be noticed."""

from collections.abc import Sequence
from pathlib import Path

from engine.mlx_backend.gpu.source import text_of
from engine.values.settings import KVFormat
from tests.kernel_proof.cases import Layer, layer
from tests.kernel_proof.prove import prove

MUTATIONS = {
    "no barrier after the table is read": ("  BARRIER;\n\n  float query", "\n  float query"),
    "no barrier before results are taken over": ("    BARRIER;\n    if (takes)", "    if (takes)"),
    "no barrier after results are taken over": (
        "      }\n    }\n    BARRIER;\n  }\n",
        "      }\n    }\n  }\n",
    ),
    "a barrier in a branch": ("    if (takes) {\n", "    if (takes) {\n      BARRIER;\n"),
    "a shuffle that some threads skip": (
        "product = sum_lanes(product);",
        "if (lane < LANES / 2) product = sum_lanes(product);",
    ),
    "a sum over half of the lanes": (
        "offset = LANES / 2; offset > 0",
        "offset = LANES / 4; offset > 0",
    ),
    "results are handed over in the wrong place": (
        "(gives ? simd - step * query_simds : simd) * TILE",
        "(gives ? simd : simd) * TILE",
    ),
    "keys that no query sees are read": (
        "clip(from + sub * BATCH + b, start, stop - 1)",
        "from + sub * BATCH + b",
    ),
    "one key too many is seen": ("clip(last + 1 - before, 0,", "clip(last + 2 - before, 0,"),
    "the window is one key short": ("last - WINDOW + 1 - before", "last - WINDOW + 2 - before"),
    "the table's first key is at 0": ("first_keys[table_row] + entry", "entry"),
    "hidden keys keep their scores": ("is_seen ? product * LOG2E : HIDDEN", "product * LOG2E"),
    "V is read in the plane of K": ("at + limits[VALUES_AT], lane", "at, lane"),
    "V of another head": ("at + limits[VALUES_AT], lane", "at + BLOCK + limits[VALUES_AT], lane"),
    "K of another head": ("* KV_HEADS + kv_head) * BLOCK + key", "* KV_HEADS) * BLOCK + key"),
    "sums are not carried over to a new peak": ("found[t].total *= kept;\n      UNROLL", "UNROLL"),
    "a place in 4 bits": ("u64(held[key / BLOCK])", "u64(held[key / BLOCK] & 15)"),
    "all rows of a prefix have the first one's queries": (
        "order[row + q / of_row]",
        "order[row]",
    ),
    "the list's rows are not put in the step's order": (
        "order[row + q / of_row]",
        "(row + q / of_row)",
    ),
    "drafts see what the first token does": (
        "last_seen[own_row * tokens + own % tokens]",
        "last_seen[own_row * tokens]",
    ),
    "a scale of the group before": (
        "index(lane, i * per_load) / SCALE_GROUP]",
        "(i * LANES + lane) / SCALE_GROUP]",
    ),
    "codes are not centred": ("& 15u) - 8)", "& 15u))"),
    "the merge leaves the last result out": (
        "for (int i = begin; i < end; ++i) {\n      const u64",
        "for (int i = begin; i < end - 1; ++i) {\n      const u64",
    ),
    "the merge weights all results alike": (
        "weighted[at * VALUE_DIM + d] * exp2_fast(stats[at * 2] - peak)",
        "weighted[at * VALUE_DIM + d]",
    ),
    "sinks of another head": ("sinks[kv_head * GROUP + own / tokens]", "sinks[kv_head * GROUP]"),
}
"""What is replaced by what."""

LAYERS = [
    layer((64, 64), group=4, window=40, has_sinks=True, width=2, most_entries=2),
    layer((128, 128), format=KVFormat.K8V4, width=3, most_entries=2),
]


def notice(before: str, after: str, folder: Path, compiler: str, seed: Sequence[int]) -> str:
    """How a fault shows: what the program says, or a wrong output; "" if it does not.

    Raises ValueError where the text has no such place.
    """
    text = text_of("paged.h")
    if before not in text:
        raise ValueError(f"the text has no {before!r}")
    return _notice(text.replace(before, after), LAYERS, folder, compiler, seed)


def _notice(
    text: str, layers: Sequence[Layer], folder: Path, compiler: str, seed: Sequence[int]
) -> str:
    found = (prove(of, folder, compiler, seed, 12, text).problem for of in layers)
    return next((problem for problem in found if problem), "")
