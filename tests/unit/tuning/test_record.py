"""The file with what comparisons of attentions have found."""

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from engine.mlx_backend.tuning import record as module
from engine.mlx_backend.tuning.kinds import LayerKind
from engine.mlx_backend.tuning.record import RecordError, TrialKey, TrialRecord
from engine.values.attention import AttentionTrial, TimedCell, TrialState
from engine.values.settings import KVFormat

KIND = LayerKind(2, 8, 64, 64, "float32", "float32", KVFormat.FULL, 32, None, False, 4096)
KEY = TrialKey("a GPU", "580.1", "0.31", "digest", KIND)
PASSED = AttentionTrial(
    str(KIND),
    TrialState.PASSED,
    cells=(TimedCell(1, 1024, {"gather": 2.0, "paged": 1.0}),),
    rejected={"cascade": "it is wrong by 7.0% of the output's size"},
)


@pytest.fixture
def record(tmp_path: Path) -> TrialRecord:
    return TrialRecord(tmp_path / "rootstock")


def written(record: TrialRecord, key: TrialKey = KEY) -> None:
    with record.locked():
        record.write(key, PASSED)


def test_an_entry_is_found_by_another_process_s_record(record: TrialRecord) -> None:
    assert record.find(KEY) is None
    written(record)
    assert TrialRecord(record.file.parent).find(KEY) == PASSED
    assert sorted(file.name for file in record.file.parent.iterdir()) == [
        "attention.json",
        "attention.lock",
    ], "nothing else is left"


@pytest.mark.parametrize(
    "other",
    [
        replace(KEY, device="another GPU"),
        replace(KEY, driver="580.2"),
        replace(KEY, mlx="0.32"),
        replace(KEY, source="another"),
        replace(KEY, kind=replace(KIND, block_size=16)),
        replace(KEY, kind=replace(KIND, format=KVFormat.Q8)),
        replace(KEY, kind=replace(KIND, window=512)),
    ],
)
def test_an_entry_holds_for_its_device_its_versions_and_its_kind_alone(
    record: TrialRecord, other: TrialKey
) -> None:
    written(record)
    assert record.find(other) is None
    written(record, other)
    assert record.find(other) == record.find(KEY) == PASSED
    with record.locked():
        record.remove(other)
    assert record.find(other) is None
    assert record.find(KEY) == PASSED


def test_a_truncated_file_is_reported_wherever_it_ends(record: TrialRecord) -> None:
    written(record)
    whole = record.file.read_bytes()
    for length in range(0, len(whole) - 1, 7):
        record.file.write_bytes(whole[:length])
        with pytest.raises(RecordError, match=r"attention\.json is damaged"):
            record.find(KEY)
        with pytest.raises(RecordError), record.locked():
            record.write(KEY, PASSED)
    record.clear()
    assert record.find(KEY) is None


@pytest.mark.parametrize("text", ['{"version": 2, "entries": []}', "[]", "\x00\x00", "null"])
def test_a_file_of_another_version_is_reported(record: TrialRecord, text: str) -> None:
    record.file.parent.mkdir()
    record.file.write_text(text)
    with pytest.raises(RecordError, match="another version wrote it"):
        record.find(KEY)


def test_a_folder_that_cannot_be_used_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    record = TrialRecord(tmp_path / "file")
    with pytest.raises(RecordError, match="cannot be used"):
        record.find(KEY)
    with pytest.raises(RecordError, match="cannot be used"), record.locked():
        pass
    with pytest.raises(RecordError, match="cannot be used"):
        record.clear()


def test_only_the_latest_entries_are_kept(
    record: TrialRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_ENTRIES", 2)
    for driver in ("1", "2", "1", "3"):  # the first is written again
        written(record, replace(KEY, driver=driver))
    kept = [record.find(replace(KEY, driver=driver)) is not None for driver in ("1", "2", "3")]
    assert kept == [True, False, True]


def test_a_process_that_compares_is_waited_for_and_not_for_ever(record: TrialRecord) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    other = TrialRecord(record.file.parent)
    with record.locked():
        with (
            pytest.raises(RecordError, match="another process"),
            other.locked(30.0, lambda: now[0], sleep),
        ):
            pass
        assert now[0] == pytest.approx(30.0, abs=0.1)
    with other.locked():
        pass


def test_the_user_s_record_is_in_the_cache_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    record = TrialRecord.of_user()
    assert record.file == tmp_path / "rootstock" / "attention.json"
    written(record)
    assert not record.file.stat().st_mode & stat.S_IWOTH
