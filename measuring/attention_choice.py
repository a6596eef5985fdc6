"""Compares attentions anew for the layers of the configured model. What is found serves from the
next start of a daemon on.
"""

from dataclasses import replace
from functools import partial

from engine.mlx_backend import assembly
from engine.mlx_backend.attentions import layer_kinds
from engine.mlx_backend.tuning.candidates import kernel_digest
from engine.mlx_backend.tuning.choice import compares
from engine.mlx_backend.tuning.kinds import LayerKind
from engine.mlx_backend.tuning.record import TrialRecord
from engine.mlx_backend.tuning.trial import Trials
from engine.values.attention import TrialState
from measuring.doctor import Cases, Figures, MeasureConfig
from measuring.engine_step import NotApplicable


def choice_cases(config: MeasureConfig) -> Cases:
    """A comparison for each kind of the model's layers. Raises NotApplicable on a CPU, ModelError,
    and RecordError for a user without a folder to keep the result in.
    """
    engine = replace(config.engine, attention="auto")
    if not compares(engine):
        raise NotApplicable("on a CPU attentions are not compared: cascade serves")
    opened = assembly.open_configured(engine)
    kinds = layer_kinds(engine, opened.loaded)
    trials = Trials(TrialRecord.of_user(), kernel_digest())
    budget_bytes = opened.machine.left_bytes // assembly.SPARE_SHARE
    every = {kind: None for own in kinds.values() for kind in own}
    return {str(kind): partial(_compare, trials, kind, budget_bytes) for kind in every}


def _compare(trials: Trials, kind: LayerKind, budget_bytes: int) -> Figures:
    """The times of each attention. Raises RuntimeError where the comparison has failed."""
    found = trials.again(kind, budget_bytes, lambda line: None)
    if found.state is not TrialState.PASSED:
        raise RuntimeError(found.why)
    times = {
        f"{cell.rows}_x_{cell.keys}_{name}_ms": milliseconds
        for cell in found.cells
        for name, milliseconds in cell.milliseconds.items()
    }
    serving = {f"{cell.rows}_x_{cell.keys}_serves": cell.fastest for cell in found.cells}
    rejected = {f"not_{name}": why for name, why in found.rejected.items()}
    return {**serving, **times, **rejected}
