"""What MLX has given out, measured around steps that take memory."""

import logging

import mlx.core as mx
import pytest

from engine.mlx_backend import host
from engine.mlx_backend.host import QUIET_SECONDS, MemoryMeter
from engine.values.stats import ModelMemory

MIB = 1 << 20


def take(mebibytes: int) -> None:
    array = mx.zeros((mebibytes, MIB // 4))
    mx.eval(array)
    del array
    mx.synchronize()  # a GPU gives back what a command buffer used when that has completed


class Meter(MemoryMeter):
    """A meter of steps that take what a test says, with a clock that is set by hand."""

    def __init__(self, workspace: int) -> None:
        self.now = 0.0
        self.used = mx.get_active_memory()
        super().__init__(ModelMemory(0, 0, 0, 0, 0, 0), workspace, self.used, lambda: self.now)

    def take(self, mebibytes: int, error: Exception | None = None) -> None:
        with self.step():
            take(mebibytes)
            if error is not None:
                raise error


def test_a_step_within_its_reservation_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    meter = Meter(64 * MIB)
    meter.take(16)
    assert not caplog.records


def test_a_step_that_took_more_is_warned_of_with_both_figures_and_not_at_once_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    meter = Meter(8 * MIB)
    for now in (0.0, 1.0, QUIET_SECONDS - 1, QUIET_SECONDS):
        meter.now = now
        meter.take(32)
    said = [record.getMessage() for record in caplog.records]
    line = "a step took 32 MiB on top of weights and KV cache; 8 MiB were reserved"
    assert said == [line, line]


@pytest.mark.device
def test_the_peak_is_of_all_steps_since_the_model_was_loaded() -> None:
    take(64)
    kept = mx.ones((4, MIB // 4))
    mx.eval(kept)
    meter = Meter(1 << 40)
    meter.take(32)
    meter.take(16)
    stats = meter.stats()
    assert 32 * MIB <= stats.peak < 40 * MIB
    assert stats.active == mx.get_active_memory() - meter.used == 0
    assert stats.model.process_bytes > 0


def test_resident_is_what_the_system_counts_as_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "process_bytes", lambda: 110 * MIB)
    assert Meter(0).stats().model.process_bytes == 110 * MIB


@pytest.mark.parametrize("error", [None, RuntimeError("out of memory")])
def test_a_step_that_fails_is_measured_as_well(
    error: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    meter = Meter(8 * MIB)
    if error is None:
        meter.take(32)
    else:
        with pytest.raises(RuntimeError, match="out of memory"):
            meter.take(32, error)
    assert len(caplog.records) == 1
