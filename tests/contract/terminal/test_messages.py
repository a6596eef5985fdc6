"""What `rootstock serve` says of names, files and memory before it loads a model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner, Result

from engine.values.settings import Section
from server.settings import Settings
from server.terminal.cli import app
from server.terminal.console import command_name
from server.terminal.flags import VLLM_FLAGS, section_of
from server.terminal.records import running_records

pytestmark = pytest.mark.process


def serve(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["serve", "--port", "0", *arguments])


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with two folders that look like checkpoints, and an empty cache."""
    for name in ("tiny", "small"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


missing = pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("./models/smal", "there is no directory {}/models/smal; did you mean models/small?"),
        ("llama3", "there is no directory {}/llama3, the Hugging Face cache does not have it, and "
         "huggingface.co cannot be reached (HF_HUB_OFFLINE is set)"),
    ],
)  # fmt: skip


@missing
def test_a_name_that_is_no_model(
    model: str,
    problem: str,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By its path, and by what the process that would fetch it says."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(models / "hub"))
    assert serve("--model", model).exit_code == 1
    assert caplog.messages == [f"cannot load {model}: {problem.format(models)}"]


def test_of_several_models_each_wrong_path_has_a_line_before_any_is_loaded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    arguments = ("--model", "rootstock-demo", "--model", "/no/such", "--model", "/nor/this")
    assert serve(*arguments).exit_code == 1
    assert caplog.messages == [
        "cannot load /no/such: there is no directory /no/such",
        "cannot load /nor/this: there is no directory /nor/this",
    ]


@missing
def test_a_draft_model_that_is_missing_is_named(
    model: str,
    problem: str,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The model that it is to draft for is there."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(models / "hub"))
    assert serve("--model", "rootstock-demo", "--draft-model", model).exit_code == 1
    assert caplog.messages == [
        f"cannot load rootstock-demo: draft_model {model} cannot be used: {problem.format(models)}"
    ]


def test_a_model_without_its_option() -> None:
    result = serve("mlx-community/Qwen3")
    assert result.exit_code == 2
    assert "did you mean --model mlx-community/Qwen3?" in result.stderr


@pytest.mark.parametrize("given", [("--max-num-seqs", "8"), ("--max-num-seqs=8",)])
def test_a_flag_of_vllm_is_answered_with_ours(given: tuple[str, ...]) -> None:
    result = serve(*given)
    assert result.exit_code == 2
    assert "--max-num-seqs is a flag of vLLM; here it is --max-running" in result.stderr


def test_the_flags_that_are_named_for_those_of_vllm_exist() -> None:
    shown = serve("--help").stdout
    assert all(re.search(rf"{ours.split()[0].strip(',')}\b", shown) for ours in VLLM_FLAGS.values())


def test_commands_in_log_lines_can_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the shell does not find `rootstock`, they have its path."""
    for name in ("PATH", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    command = [sys.executable, "-m", "server", "serve", "--port", "0", "--model", "llama3:8b"]
    logged = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False).stderr
    assert f"`{command_name()} pull mlx-community/Qwen3-4B-4bit`" in logged


def test_a_budget_that_is_too_small_is_said_to_be_the_budget(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert serve("--demo", "--memory-budget", "10MB").exit_code == 1
    assert re.match(
        r"cannot load rootstock-demo: the model does not fit: it needs at least \d+ MiB \(.*\), "
        r"and memory_budget leaves it 10 MiB: raise memory_budget, or lower ",
        caplog.messages[-1],
    )


@pytest.mark.parametrize("folder", ["file", "file/below", "/proc/x"])
def test_a_disk_cache_that_cannot_be_written_is_known_before_a_model_is_loaded(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if folder.startswith("/proc") and not Path("/proc").exists():
        pytest.skip("there is no /proc")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert serve("--demo", "--disk-cache", folder).exit_code == 1
    (message,) = caplog.messages
    if folder == "file":
        assert message == "disk_cache: file is a file; a folder is needed"
    else:
        assert message.startswith(f"disk_cache: cannot write to the folder {folder} (")
        assert message.endswith("): name one on a disk that you may write to")


def test_a_disk_that_is_fuller_than_its_cache_may_become_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = ("--disk-cache-bytes", "900000GiB", "--disk-cache", str(tmp_path / "kv"))
    assert serve("--model", "/no/such", *limits).exit_code == 1
    assert re.match(
        rf"disk_cache: the disk of {tmp_path}/kv has room for [\d.]+ GiB, less than "
        r"disk_cache_bytes, 878\.91 TiB",
        caplog.messages[0],
    )


def test_help_has_every_setting_in_one_section() -> None:
    in_none = [name for name in Settings.model_fields if section_of(name) is None]
    assert in_none == ["config", "log_level"]
    command = [sys.executable, "-m", "server", "serve", "--help"]
    wide = {**os.environ, "COLUMNS": "200"}
    shown = subprocess.run(command, env=wide, capture_output=True, text=True, check=True).stdout
    sections = re.findall(r"^(\w[\w ]*):$", shown, re.MULTILINE)
    assert sections == ["Options", *Section]
    assert 190 < max(map(len, shown.splitlines())) <= 200


MOST_LINES = 8


def test_a_start_has_the_few_lines_that_an_operator_needs_and_a_stop_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, which has a record from the time it listens."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    command = [sys.executable, "-m", "server", "serve", "--demo", "--port", "0"]
    command += ["--kv-cache-bytes", "16MiB"]
    lines = list[str]()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line.split(maxsplit=3)[3])
            if "ready on " in line:
                break
        (record,) = running_records()
        assert (record.pid, record.models) == (process.pid, ("rootstock-demo",))
        assert f"ready on {record.url}\n" in line
        process.terminate()
        last = [line.split(maxsplit=3)[3] for line in process.stderr.read().splitlines()]
    assert running_records() == []
    lines = [line for line in lines if not line.endswith("…\n")]  # progress, of a slow start
    assert len(lines) <= MOST_LINES, lines
    of_model = [line.removeprefix("rootstock: rootstock-demo: ") for line in lines]
    assert [line.partition(" ")[0] for line in of_model if line not in lines] == [
        *(["model", "BLAS:"] if any(line.startswith("BLAS") for line in of_model) else ["model"]),
        *("weights:", "KV", "decode:"),
    ]
    assert [line.partition(" on ")[0] for line in lines[-2:]] == [
        *("rootstock: the dashboard is", "rootstock: ready")
    ]
    assert last == [
        "rootstock: finishing running requests, for up to 30 s; Ctrl-C again stops at once",
        "rootstock: stopped",
    ]
