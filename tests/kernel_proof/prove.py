"""Random tables through the text, compared with numpy in float64."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.kernel_proof.cases import TOLERANCES, Layer, attention, error, random_case
from tests.kernel_proof.program import Fault, build, run


@dataclass
class Report:
    """What came of the cases of a layer. `problem`: "" if all are right. `counts`: how many cases
    have what.
    """

    label: str
    worst: float = 0.0
    problem: str = ""
    counts: Counter[str] = field(default_factory=Counter)


def label_of(of: Layer) -> str:
    """What a layer is, in a line."""
    kind = of.kind
    return (
        f"{kind.key_dim}/{kind.value_dim} as {kind.keys.name}/{kind.values.name}, "
        f"{kind.kv_heads} KV heads of {kind.group}, up to {of.width} tokens, "
        f"blocks of {kind.block_size}, window {kind.window}, lanes {kind.lanes}, "
        f"tile {kind.tile}, SIMD groups {kind.simds}"
    )


def prove(
    of: Layer, folder: Path, compiler: str, seed: Sequence[int], n_cases: int, text: str = ""
) -> Report:
    """Build the text for a layer and compare `n_cases` random cases. `text`: see `build`."""
    kind, random = of.kind, np.random.default_rng(seed)
    report = Report(label_of(of))
    cases = [random_case(of, random) for _ in range(n_cases)]
    for one in cases:
        report.counts["cases"] += 1
        report.counts["with a shared prefix"] += bool((one.work.units[:, 1] > 1).any())
        report.counts["whose rows have grown since their list was made"] += one.is_older
        report.counts["with drafts"] += one.case.last_seen.shape[1] > 1
        report.counts["with rows of padding"] += bool(one.case.is_padding.any())
    try:
        program = build(kind, folder, compiler, text)
        outcomes = run(program, [one.arrays for one in cases])
    except Fault as fault:
        report.problem = str(fault)
        return report
    errors = [
        error(kind, outcome.output, attention(kind, one.case))
        for one, outcome in zip(cases, outcomes, strict=True)
    ]
    report.worst = max(errors)
    if not report.worst < TOLERANCES[kind.queries]:
        report.problem = f"wrong by {report.worst:.1e} of the largest number"
    return report
