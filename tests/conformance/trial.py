"""Builds, loads and serves one case: `python -m tests.conformance.trial qwen3 empty_directory`."""

import math
import sys
import traceback
import warnings
from pathlib import Path

from mlx.nn.layers.base import Module
from mlx_lm.utils import load_model
from pydantic import TypeAdapter

from engine.api import ModelError, one_line
from engine.mlx_backend.decode.choice import REHEARSED_ROWS, Rehearsal, rehearsal_model
from engine.mlx_backend.decode.compiled import Unfit
from engine.mlx_backend.kv.layout import (
    CacheSpec,
    ChunkedCacheSpec,
    KVCacheSpec,
    Layout,
    OpenGroupSpec,
    StateSpec,
    UnusedSpec,
)
from engine.mlx_backend.kv.shape import LayerShape
from tests.conformance.cases import CASES, Case
from tests.conformance.examiner import ERROR_TOLERANCE, Examiner
from tests.conformance.outcome import Outcome, Verdict
from tests.offline import Room, Served, load


def attempt(case: Case, parent: Path) -> Outcome:
    """Serve the case from a checkpoint written below `parent`; what that raises is an outcome."""
    checkpoint = case.write(parent)
    try:
        served = load(checkpoint)
    except ModelError as error:
        reason = " ".join(str(error).replace(str(checkpoint), "the checkpoint").split())
        return Outcome(case.name, Verdict.REFUSED, reason=reason)
    peer, _ = load_model(checkpoint)
    return _examined(case.name, served, peer)


def in_words(layout: Layout) -> str:
    """What the layers keep."""
    words = {_in_words(spec): None for spec in layout.specs}
    return ", ".join(sorted(filter(None, words)))


def _examined(name: str, served: Served, peer: Module) -> Outcome:
    examiner, error = Examiner(served, peer), float("nan")
    try:
        examiner.examine()
        error = examiner.largest_error()
    # Whatever a model raises when it is served is what this run is there to find.
    except Exception as failure:
        traceback.print_exc()
        examiner.problems.append(f"{type(failure).__name__}: {failure}")
    else:
        if not error < ERROR_TOLERANCE:
            examiner.problems.append(f"logits are wrong by {error:.1e} of their size")
    return Outcome(
        name,
        Verdict.WRONG if examiner.problems else Verdict.SERVED,
        in_words(served.layout),
        served.execution.batching.name,
        error,
        "; ".join(examiner.problems),
        compiled_note(served),
    )


def compiled_note(served: Served) -> str:
    """The cell of the column "compiled decode": "yes" where compiled steps say what eager ones do,
    or why decode steps are not compiled.
    """
    block_size = Room(n_blocks=8).block_size
    try:
        model = rehearsal_model(
            served.loaded.model, served.layout, served.execution, block_size, math.inf
        )
        for n_rows in REHEARSED_ROWS:
            Rehearsal(model, n_rows).check()
    except Unfit as reason:
        return str(reason)
    except Exception as error:  # a model may raise anything while it is traced
        return f"{type(error).__name__}: {one_line(error)}"
    return "yes"


def _in_words(spec: CacheSpec) -> str:
    match spec:
        case KVCacheSpec(shape=LayerShape(stride=stride)) if stride > 1:
            return f"groups of {stride}"
        case OpenGroupSpec() | UnusedSpec():
            return ""
        case KVCacheSpec(window=None):
            return "full attention"
        case ChunkedCacheSpec(window=window):
            return f"chunks of {window}"
        case KVCacheSpec(window=window):
            return f"window {window}"
        case StateSpec():
            return "recurrent"


def main(name: str, parent: str) -> None:
    """Print the outcome as JSON, the last line of the output."""
    warnings.simplefilter("ignore")
    outcome = attempt(CASES[name], Path(parent))
    print(TypeAdapter(Outcome).dump_json(outcome).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
