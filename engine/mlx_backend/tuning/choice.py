"""Chooses the attentions that may serve a model on a GPU, by comparisons on this device."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import mlx.core as mx

from engine.api import Report
from engine.mlx_backend.model.attention import Attention
from engine.mlx_backend.tuning.candidates import PAGED, candidates_for, kernel_digest
from engine.mlx_backend.tuning.chosen import ChosenAttention
from engine.mlx_backend.tuning.kinds import Kinds, LayerKind
from engine.mlx_backend.tuning.record import RecordError, TrialRecord
from engine.mlx_backend.tuning.trial import Trials
from engine.values.attention import GATHER, AttentionTrial, TimedCell, TrialState
from engine.values.settings import EngineConfig

TrialOf: TypeAlias = Callable[[LayerKind], AttentionTrial | None]
"""What is known of the attentions of a kind; None if they were not compared. Raises RecordError."""

WHY_NOT_ON_CPUS = {
    GATHER: "it is slower on CPUs",
    "cascade": "the setting attention is another",
    PAGED: "its kernel is for GPUs",
}
"""By name, in the order in which they are shown."""

OTHERS = "others"
NOT_COMPARED = "it will be compared when the model is loaded"
SLOWER = "it is slower"
LEFT = "the machine or the daemon went down while attentions were compared"
AGAIN = "`rootstock doctor --measure --model NAME` compares again"


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The attentions that may serve a model, the preferred one first; the last is the reference.
    `why_not`: the reason against each other one, by name. `trials`: the comparisons.
    """

    attentions: tuple[Attention, ...]
    why_not: Mapping[str, str] = field(default_factory=dict)
    trials: tuple[AttentionTrial, ...] = ()

    def words(self, serving: Attention) -> str:
        """`paged, gather; not cascade: it is slower`, where `serving` serves."""
        why_not = dict(self.why_not)
        if serving is not self.attentions[0]:
            why_not.pop(serving.name, None)
            why_not[self.attentions[0].name] = "the check at load has rejected it"
        return "; ".join([serving.name, *(f"not {name}: {why}" for name, why in why_not.items())])


def compares(config: EngineConfig) -> bool:
    """Whether comparisons on this device decide. On a CPU there is only what stands in for the
    kernel.
    """
    return config.attention == "auto" and mx.default_device() != mx.cpu


def choose_attention(
    config: EngineConfig,
    kinds: Kinds,
    attentions: Sequence[Attention],
    spare_bytes: int | None,
    report: Report,
) -> AttentionChoice:
    """The attentions that may serve a model. Where comparisons decide, those that were not made yet
    are made, in at most `spare_bytes` of memory; where that is None, they are not. Elsewhere
    `attentions` serve, the preferred one first and `gather` last.
    """
    preferred, gather = attentions[0], attentions[-1]
    if not compares(config):
        is_set = config.attention != "auto"
        why_not = {
            name: f"the setting attention is {config.attention}" if is_set else why
            for name, why in WHY_NOT_ON_CPUS.items()
            if name != preferred.name
        }
        if preferred.name == PAGED:
            always = {window: [TimedCell(1, 1, {PAGED: 0.0})] for window in (None, *kinds)}
            candidates = {PAGED: preferred, GATHER: gather}
            preferred = ChosenAttention(candidates, always, config.block_size)
        return AttentionChoice((preferred, *attentions[1:]), why_not)
    try:
        trials = Trials(TrialRecord.of_user(), kernel_digest())
    except RecordError as error:
        return AttentionChoice((gather,), {OTHERS: str(error)})
    trial_of: TrialOf = trials.known
    if spare_bytes is not None:
        trial_of = partial(trials.result, budget_bytes=spare_bytes, report=report)
    return compared(kinds, gather, config.block_size, trials, trial_of)


def compared(
    kinds: Kinds,
    gather: Attention,
    block_size: int,
    trials: Trials,
    trial_of: TrialOf,
) -> AttentionChoice:
    """The fastest of the attentions that were compared, and `gather` where none was or a comparison
    went wrong. `trial_of` may have kinds compared.
    """
    found, why_not = dict[LayerKind, AttentionTrial](), dict[str, str]()
    candidates: dict[str, Attention] = {}
    every = list({kind: None for own in kinds.values() for kind in own})
    try:
        for kind in every:
            of_kind, excluded = candidates_for(kind, gather)
            candidates |= of_kind
            why_not |= excluded
            if len(of_kind) == 1:
                continue
            problem, left = NOT_COMPARED, [name for name in of_kind if name != GATHER]
            if (trial := trial_of(kind)) is not None:
                found[kind] = trial
                why_not |= trial.rejected
                problem, left = _problem(trial), [n for n in left if n not in trial.rejected]
            if problem and left:
                others = ", ".join(left)
                why_not[others if len(every) == 1 else f"{others} for {kind}"] = problem
    except RecordError as error:
        return AttentionChoice((gather,), {OTHERS: f"{error}; {AGAIN}"})
    tables = {window: combined(own, found) for window, own in kinds.items()}
    wins = {cell.fastest for cells in tables.values() for cell in cells} | {GATHER}
    why_not = {name: why for name, why in why_not.items() if name not in wins}
    if any(tables.values()):
        why_not |= {name: why_not.get(name, SLOWER) for name in candidates if name not in wins}
    trials_made = tuple(found.values())
    if wins == {GATHER}:
        return AttentionChoice((gather,), why_not, trials_made)

    def on_failure(why: str) -> None:
        for kind, trial in found.items():
            trials.fail(kind, trial, why)

    serving = {name: of for name, of in candidates.items() if name in wins}
    chosen = ChosenAttention(serving, tables, block_size, on_failure)
    if GATHER not in chosen.names:
        why_not[GATHER] = SLOWER
    return AttentionChoice((chosen, gather), why_not, trials_made)


def _problem(trial: AttentionTrial) -> str:
    """Why a comparison has no times; "" if it has."""
    if trial.state in {TrialState.FAILED, TrialState.POSTPONED}:
        return trial.why
    return f"{LEFT}; {AGAIN}" if trial.state is TrialState.TRYING else ""


def combined(
    kinds: Counter[LayerKind], trials: Mapping[LayerKind, AttentionTrial]
) -> list[TimedCell]:
    """The times of all layers of an arena together. None where they are not known for a kind."""
    tables = [
        {(cell.rows, cell.keys): cell.milliseconds for cell in trials[kind].cells}
        for kind in kinds
        if kind in trials
    ]
    if len(tables) < len(kinds):
        return []
    cells = list[TimedCell]()
    for rows, keys in tables[0]:
        of_kinds = [table.get((rows, keys), {}) for table in tables]
        medians = {
            name: sum(n * of[name] for n, of in zip(kinds.values(), of_kinds, strict=True))
            / kinds.total()
            for name in of_kinds[0]
            if all(name in of for of in of_kinds)
        }
        if medians:
            cells.append(TimedCell(rows, keys, medians))
    return cells
