"""Has attentions compared once for each kind of layer, in a process of its own, and keeps the
result. Nothing here raises because of what that process does.
"""

import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, TypeAlias

import mlx.core as mx
from pydantic import TypeAdapter

from engine.api import Report, one_line
from engine.mlx_backend.tuning.kinds import LayerKind
from engine.mlx_backend.tuning.record import RecordError, TrialKey, TrialRecord
from engine.process.child import ending, start_child
from engine.values.attention import AttentionTrial, TrialState

TRIAL_SECONDS = 20.0
"""The time limit of the process, its start included."""

COMPARE_SHARE = 0.7
"""The share of this time in which the process tries to be done, once it has started."""

CHILD = "engine.mlx_backend.tuning.child"

_NVIDIA = Path("/proc/driver/nvidia/version")
_EXIT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Task:
    """A comparison for a process to make. It may take `budget_bytes` of memory."""

    folder: Path  # of the record
    key: TrialKey
    budget_bytes: int
    seconds: float

    def undo(self) -> None:
        """Remove the entry that says that the comparison has begun. Raises RecordError."""
        record = TrialRecord(self.folder)
        with record.locked():
            found = record.find(self.key)
            if found is not None and found.state is TrialState.TRYING:
                record.remove(self.key)


TASK = TypeAdapter(Task)
RESULT = TypeAdapter(AttentionTrial)


class NoResult(NamedTuple):
    """Why a process has found nothing, and what follows from that."""

    why: str
    state: TrialState = TrialState.FAILED


class TrialProcess:
    """A process that makes one comparison, and the connection to it."""

    def __init__(self, task: Task, module: str = CHILD) -> None:
        """Raises OSError if no process can be started."""
        # A library that crashes prints long reports.
        ours, self._process = start_child(module, errors=subprocess.DEVNULL)
        self._connection = Connection(ours.detach())
        with suppress(OSError):  # one that has ended at once has no result
            self._connection.send_bytes(TASK.dump_json(task))

    def result(self, seconds: float) -> AttentionTrial | NoResult:
        """What it has found, or why there is nothing."""
        try:
            if not self._connection.poll(seconds):
                return NoResult(f"its process gave no result in {seconds:g} s")
            received = self._connection.recv_bytes()
        except (EOFError, OSError):
            return self._how_it_ended()
        try:
            return RESULT.validate_json(received)
        except ValueError:
            return NoResult("its process gave a result that cannot be read")

    def close(self) -> None:
        """End the process, whatever it does. One that the device does not let go is left alone."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_SECONDS)
        self._connection.close()

    def _how_it_ended(self) -> NoResult:
        try:
            code = self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return NoResult("its process fell silent")
        # A system that lacks memory ends processes so.
        state = TrialState.POSTPONED if code == -signal.SIGKILL else TrialState.FAILED
        return NoResult(f"its process ended: {ending(code)}", state)


Start: TypeAlias = Callable[[Task], TrialProcess]


class Trials:
    """The comparisons of this machine's device, of which the results are kept in `record`."""

    def __init__(
        self,
        record: TrialRecord,
        source: str,
        start: Start = TrialProcess,
        seconds: float = TRIAL_SECONDS,
    ) -> None:
        """`source`: a digest of the kernel's source."""
        self._record = record
        self._device = str(mx.device_info().get("device_name", "unknown"))
        self._driver, self._mlx, self._source = driver_version(), metadata.version("mlx"), source
        self._start = start
        self._seconds = seconds

    def known(self, kind: LayerKind) -> AttentionTrial | None:
        """What is kept of a comparison; None if there was none. Raises RecordError."""
        return self._record.find(self._key(kind))

    def result(self, kind: LayerKind, budget_bytes: int, report: Report) -> AttentionTrial:
        """What is kept of a comparison, which is made if there was none. One that was postponed is
        not kept. Raises RecordError.
        """
        found = self.known(kind)
        if found is not None and found.state is not TrialState.TRYING:
            return found
        with self._record.locked():
            found = self.known(kind)
            if found is not None:  # another process has made it, or it was left
                return found
            return self._make_and_keep(kind, budget_bytes, report)

    def again(self, kind: LayerKind, budget_bytes: int, report: Report) -> AttentionTrial:
        """Make a comparison whatever is kept. A file that cannot be read is replaced. Raises
        RecordError where none can be written.
        """
        with self._record.locked():
            try:
                self.known(kind)
            except RecordError:
                self._record.clear()
            return self._make_and_keep(kind, budget_bytes, report)

    def _make_and_keep(self, kind: LayerKind, budget_bytes: int, report: Report) -> AttentionTrial:
        """Make a comparison. The caller holds the record's lock."""
        key, record = self._key(kind), self._record
        report(f"comparing attentions on this device, once for {kind}…")
        record.write(key, AttentionTrial(str(kind), TrialState.TRYING))
        try:
            seconds = COMPARE_SHARE * self._seconds
            made = self._make(Task(record.file.parent, key, budget_bytes, seconds))
        except BaseException:  # such as Ctrl-C, which is no fault of the device
            record.remove(key)
            raise
        if made.state is TrialState.POSTPONED:
            record.remove(key)
        else:
            record.write(key, made)
        return made

    def fail(self, kind: LayerKind, trial: AttentionTrial, why: str) -> None:
        """Note that what was compared has failed while it served. Where that cannot be written, the
        next start does not know of it.
        """
        failed = replace(trial, state=TrialState.FAILED, why=why, cells=())
        with suppress(RecordError), self._record.locked():
            self._record.write(self._key(kind), failed)

    def _make(self, task: Task) -> AttentionTrial:
        kind = str(task.key.kind)
        try:
            process = self._start(task)
        except OSError as error:
            return AttentionTrial(kind, TrialState.POSTPONED, one_line(error))
        try:
            found = process.result(self._seconds)
        finally:
            process.close()
        if isinstance(found, NoResult):
            return AttentionTrial(kind, found.state, found.why)
        return found

    def _key(self, kind: LayerKind) -> TrialKey:
        return TrialKey(self._device, self._driver, self._mlx, self._source, kind)


def driver_version(nvidia: Path = _NVIDIA) -> str:
    """The version of the GPU's driver. On macOS it is the system's, which the driver is a part of;
    elsewhere, without NVIDIA's driver, it is "".
    """
    if sys.platform == "darwin":
        return platform.mac_ver()[0]
    try:
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", nvidia.read_text())
    except OSError:
        return ""
    return found[0] if found else ""
