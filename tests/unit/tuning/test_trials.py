"""Comparisons in a process of their own, which may do anything."""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from engine.mlx_backend.tuning.record import RecordError, TrialKey, TrialRecord
from engine.mlx_backend.tuning.trial import Task, TrialProcess, Trials, driver_version
from engine.values.attention import AttentionTrial, TimedCell, TrialState
from tests.unit.tuning.test_record import KIND

TRIAL = "engine.mlx_backend.tuning.trial"
BUDGET_BYTES = 1 << 30
fake_process = partial(TrialProcess, module="tests.unit.tuning.fake_child")


@dataclass
class Counted:
    """Starts fake processes, and notes their tasks and what the record said then."""

    record: TrialRecord
    tasks: list[Task] = field(default_factory=list)
    states: list[TrialState | None] = field(default_factory=list)

    def start(self, task: Task) -> TrialProcess:
        found = self.record.find(task.key)
        self.states.append(None if found is None else found.state)
        self.tasks.append(task)
        return fake_process(task)


@pytest.fixture
def counted(tmp_path: Path) -> Counted:
    return Counted(TrialRecord(tmp_path / "rootstock"))


def compare(
    counted: Counted, source: str, again: bool = False, seconds: float = 60.0
) -> AttentionTrial:
    trials = Trials(counted.record, source, counted.start, seconds)
    make = trials.again if again else trials.result
    found = make(KIND, BUDGET_BYTES, lambda line: None)
    assert trials.known(KIND) == found, "it is kept"
    return found


@pytest.mark.process
def test_a_kind_of_layer_is_compared_once(counted: Counted) -> None:
    expected = AttentionTrial(
        "a kind",
        TrialState.PASSED,
        cells=(TimedCell(1, 1024, {"gather": 2.0, "cascade": 1.0}),),
    )
    lines = list[str]()
    trials = Trials(counted.record, "answers", counted.start)
    assert trials.known(KIND) is None
    assert trials.result(KIND, BUDGET_BYTES, lines.append) == expected
    assert lines == [f"comparing attentions on this device, once for {KIND}…"]
    assert trials.result(KIND, BUDGET_BYTES, lines.append) == expected
    assert len(lines) == len(counted.tasks) == 1
    assert counted.states == [TrialState.TRYING], "before the process starts"
    assert counted.tasks[0].budget_bytes == BUDGET_BYTES


@pytest.mark.process
@pytest.mark.parametrize(
    ("child", "why"),
    [
        ("exits", "its process ended: exit status 3"),
        ("crashes", "its process ended: SIGSEGV"),
        ("babbles", "its process gave a result that cannot be read"),
    ],
)
def test_a_process_that_fails_is_the_reason_and_not_started_again(
    counted: Counted, child: str, why: str
) -> None:
    failed = AttentionTrial(str(KIND), TrialState.FAILED, why)
    assert compare(counted, child) == failed
    assert compare(counted, child) == failed
    assert len(counted.tasks) == 1
    assert compare(counted, child, again=True) == failed
    assert len(counted.tasks) == 2


@pytest.mark.process
def test_a_process_that_hangs_is_ended_at_the_limit(counted: Counted) -> None:
    found = compare(counted, "hangs", seconds=0.5)
    assert (found.state, found.why) == (
        TrialState.FAILED,
        "its process gave no result in 0.5 s",
    )
    assert compare(counted, "hangs", seconds=0.5) == found
    assert len(counted.tasks) == 1


def test_where_no_process_can_be_started_that_is_the_reason(counted: Counted) -> None:
    def start(task: Task) -> TrialProcess:
        raise OSError("too many processes")

    trials = Trials(counted.record, "", start)
    found = trials.result(KIND, BUDGET_BYTES, lambda line: None)
    assert (found.state, found.why) == (TrialState.POSTPONED, "too many processes")
    assert trials.known(KIND) is None


@pytest.mark.process
@pytest.mark.parametrize(
    ("child", "why"),
    [("is killed", "its process ended: SIGKILL"), ("has no memory", "out of memory")],
)
def test_what_lacked_memory_is_compared_at_the_next_start(
    counted: Counted, child: str, why: str
) -> None:
    trials = Trials(counted.record, child, counted.start)
    for n_tasks in (1, 2):
        found = trials.result(KIND, BUDGET_BYTES, lambda line: None)
        assert (found.state, found.why) == (TrialState.POSTPONED, why)
        assert trials.known(KIND) is None
        assert len(counted.tasks) == n_tasks


def key_of(counted: Counted, source: str) -> TrialKey:
    """The key under which a comparison is kept."""
    compare(counted, source)
    return counted.tasks[-1].key


@pytest.mark.process
def test_an_entry_left_at_trying_is_compared_again_when_the_user_asks(counted: Counted) -> None:
    key, left = key_of(counted, "answers"), AttentionTrial(str(KIND), TrialState.TRYING)
    with counted.record.locked():
        counted.record.write(key, left)
    assert compare(counted, "answers") == compare(counted, "answers") == left
    assert len(counted.tasks) == 1, "the machine went down, and may do so again"
    assert compare(counted, "answers", again=True).state is TrialState.PASSED


@pytest.mark.process
def test_a_file_that_cannot_be_read_is_replaced_when_the_user_asks(counted: Counted) -> None:
    compare(counted, "answers")
    counted.record.file.write_bytes(b"{")
    with pytest.raises(RecordError):
        compare(counted, "answers")
    assert len(counted.tasks) == 1
    trials = Trials(counted.record, "answers", fake_process)
    assert trials.again(KIND, BUDGET_BYTES, lambda line: None).state is TrialState.PASSED
    assert compare(counted, "answers").state is TrialState.PASSED


@pytest.mark.process
@pytest.mark.parametrize("changed", ["device", "driver", "mlx", "source"])
def test_a_changed_device_or_version_is_compared_anew(
    counted: Counted, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = key_of(counted, "answers")
    with counted.record.locked():
        counted.record.write(key, AttentionTrial(str(KIND), TrialState.TRYING))
    match changed:
        case "device":
            monkeypatch.setattr(f"{TRIAL}.mx.device_info", lambda: {"device_name": "another"})
        case "driver":
            monkeypatch.setattr(f"{TRIAL}.driver_version", lambda: "another")
        case "mlx":
            monkeypatch.setattr(f"{TRIAL}.metadata.version", lambda name: "another")
    source = "another" if changed == "source" else "answers"
    assert compare(counted, source).state is TrialState.PASSED
    assert len(counted.tasks) == 2


def test_an_interrupted_start_is_no_fault_of_the_device(counted: Counted) -> None:
    def start(task: Task) -> TrialProcess:
        raise KeyboardInterrupt

    trials = Trials(counted.record, "", start)
    with pytest.raises(KeyboardInterrupt):
        trials.result(KIND, BUDGET_BYTES, lambda line: None)
    assert trials.known(KIND) is None


@pytest.mark.process
def test_where_its_parent_ends_the_process_removes_the_entry_and_ends(counted: Counted) -> None:
    """As when a daemon is stopped in the course of its first start."""
    key = key_of(counted, "answers")
    passed = counted.record.find(key)
    assert passed is not None
    for state in (AttentionTrial(str(KIND), TrialState.TRYING), passed):
        with counted.record.locked():
            counted.record.write(key, state)
        process = TrialProcess(Task(counted.record.file.parent, key, BUDGET_BYTES, 60.0))
        process._connection.close()
        assert process._process.wait(300) == 0
        process.close()
        left = counted.record.find(key)
        assert left == (None if state is not passed else passed), "a result stays"


@pytest.mark.process
@pytest.mark.slow
def test_this_device_compares_what_it_has(counted: Counted) -> None:
    """The whole path: check and race, in the process that serves users."""
    kind = replace(KIND, longest=64)
    trials = Trials(counted.record, "", seconds=1000.0)
    found = trials.result(kind, BUDGET_BYTES, lambda line: None)
    assert found.state is TrialState.PASSED, found.why
    assert {*found.cells[0].milliseconds} >= {"gather", "cascade", "paged"}
    assert trials.result(kind, BUDGET_BYTES, lambda line: None) == found


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul\n", "580.65.06"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86  Release\n", "570.86"),
        ("nothing", ""),
    ],
)
def test_the_driver_s_version_is_read(text: str, version: str, tmp_path: Path) -> None:
    (tmp_path / "version").write_text(text)
    assert driver_version(tmp_path / "version") == version
    assert driver_version(tmp_path / "missing") == ""
