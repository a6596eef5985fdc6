"""The `rootstock` command as it answers a user who got something wrong."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from engine.values.attention import AttentionTrial, TimedCell, TrialState
from engine.values.stats import ArrayCounts, MachineReport, ModelMemory
from kvstore.disk.store import DiskStore
from kvstore.disk.types import MIB, DiskLimits
from measuring.doctor import MeasureConfig, MeasuredCase, Measurements, Section
from server import __version__
from server.generation.template import TemplateTraits
from server.settings import Settings
from server.terminal.cli import SUMMARIES, app
from server.terminal.doctor import machine_table, to_markdown
from server.terminal.flags import IN_YAML_ALONE, flag, with_settings
from tests.contract.fake_engine import CARD

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--port", "65536"], "port: "),
        (["--kv-cache-bytes", "4 pounds"], "kv_cache_bytes: "),
        (["--adapter", "folder"], "adapters: "),
        (["--max-running", "64", "--step-tokens", "8", "--no-prefix-cache"], "step_tokens: "),
    ],
)
def test_wrong_settings_are_one_line_and_a_usage_error(arguments: list[str], line: str) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {line}")
    assert len(result.stderr.splitlines()) == 1


def test_a_busy_port_is_known_before_loading(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(app, ["serve", "--port", port, "--model", "/no/such/model"])
    assert result.exit_code == 1
    (message,) = caplog.messages
    taken_port = f"port {port} of 127.0.0.1 is taken by another program: start this one with --port"
    assert message.startswith(taken_port)


def test_a_disk_cache_that_is_in_use_is_known_before_a_model_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = DiskStore.open(tmp_path, "model", DiskLimits(16 * MIB))
    limits = ["--kv-cache-bytes", "16MiB", "--disk-cache-bytes", "64MiB"]
    arguments = ["serve", "--demo", "--port", "0", *limits, "--disk-cache", str(tmp_path)]
    assert CliRunner().invoke(app, arguments).exit_code == 1
    tier.close()
    owner = f"is in use by another daemon (pid {os.getpid()})"
    assert caplog.messages == [f"the disk cache {tmp_path} {owner}"]


def test_an_arena_larger_than_memory_ends_in_a_line_and_not_in_a_signal() -> None:
    command = [sys.executable, "-m", "server", "serve", "--demo", "--port", "0"]
    command += ["--kv-cache-bytes", "900GiB"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert "cannot load rootstock-demo: kv_cache_bytes of 900.0 GiB does not fit" in last


def test_every_command_is_named_has_a_module_and_says_what_it_is_for() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert {*SUMMARIES} <= set(result.stdout.split())
    for name in SUMMARIES:
        result = CliRunner().invoke(app, [name, "--help"])
        assert result.exit_code == 0, name
        assert f" {name} [OPTIONS]" in result.stdout.splitlines()[0]


def test_a_slip_gets_a_suggestion() -> None:
    assert "Did you mean 'serve'?" in CliRunner().invoke(app, ["sevre"]).stderr


def test_the_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"rootstock {__version__}\n"


def help_of(command: str) -> str:
    """In lines so long that none breaks, be it at a hyphen."""
    shown = CliRunner().invoke(app, [command, "--help"], terminal_width=10_000)
    return " ".join(shown.stdout.split())


def test_every_setting_has_a_flag_whose_help_says_what_it_is_and_its_default() -> None:
    shown = help_of("serve")
    for name in {*Settings.model_fields} - IN_YAML_ALONE:
        field = Settings.model_fields[name]
        assert field.description, name
        assert f"{flag(name, field)} " in shown
        assert field.description in shown
    assert "Tokens in one block of the KV cache. Default: 32." in shown
    assert "Default: 8MiB." in shown
    assert "Default: None" not in shown
    assert "--kv-cache-bytes " in help_of("doctor")
    assert "--port " not in help_of("doctor")


@pytest.mark.parametrize(
    ("arguments", "setting", "value"),
    [
        ([], "port", 1),  # as the file has it: a flag that is not given has no say
        (["--port", "2"], "port", 2),
        (["--no-prefix-cache"], "prefix_cache", False),
        (["--allow-public-without-key"], "allow_public_without_key", True),
        (["--max-body-bytes", "4KiB"], "max_body_bytes", 4096),
    ],
)
def test_flags_become_settings(
    arguments: list[str], setting: str, value: object, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text("port: 1\n")
    given: list[Settings] = []
    probe = typer.Typer()
    probe.command()(with_settings()(given.append))
    result = CliRunner().invoke(probe, ["--config", str(tmp_path / "config.yaml"), *arguments])
    assert result.exit_code == 0
    assert [getattr(settings, setting) for settings in given] == [value]


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("rootstock se", ["serve"]),
        ("rootstock serve --attention ga", ["gather"]),
        ("rootstock cache st", ["stats"]),
        ("rootstock launch co", ["codex", "copilot"]),
        ("rootstock chat --se", ["--seed"]),
    ],
)
def test_a_shell_can_complete_commands_flags_and_choices(words: str, completed: list[str]) -> None:
    environment = {
        "_ROOTSTOCK_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    result = CliRunner().invoke(app, [], prog_name="rootstock", env=environment)
    assert result.stdout.split() == completed


COMPLETING_IN_BASH = """
set -e
eval "$(rootstock --show-completion bash)"
COMP_WORDS=(rootstock cac) COMP_CWORD=1
"$(complete -p rootstock | sed 's/.*-F \\([^ ]*\\) .*/\\1/')" rootstock cac rootstock
echo "${COMPREPLY[@]}"
"""

# Without a terminal zsh completes nothing: what its own functions would get is printed.
COMPLETING_IN_ZSH = """
compdef() { completer=$1 }
_arguments() { print -r -- ${${1#*\\"}%%\\"*} }  # of '*: :(("NAME":"HELP"))'
eval "$(rootstock --show-completion zsh)"
words=(rootstock cac) CURRENT=2
$completer
"""

COMPLETING_IN_FISH = """
rootstock --show-completion fish | source
complete --do-complete "rootstock cac" | string split --fields 1 \\t
"""

SHELLS = {
    "bash": ("bash", "--norc", "-c", COMPLETING_IN_BASH),
    "zsh": ("zsh", "-f", "-c", COMPLETING_IN_ZSH),
    "fish": ("fish", "--no-config", "-c", COMPLETING_IN_FISH),
}


@pytest.mark.parametrize("shell", SHELLS)
def test_what_show_completion_prints_completes(shell: str, tmp_path: Path) -> None:
    """The shell's name is given, because a test has no shell that Typer could find."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not here")
    (command := tmp_path / "rootstock").write_text(
        f'#!/bin/sh\nexec {sys.executable} -m server "$@"'
    )
    command.chmod(0o755)
    ended = subprocess.run(
        SHELLS[shell],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
        },
    )
    assert (ended.stdout, ended.stderr) == ("cache\n", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_that_cannot_be_written_is_a_line(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home below a file is one in which not even root can write."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))
    monkeypatch.setattr("typer._completion_shared._get_shell_name", lambda: shell)
    result = CliRunner().invoke(app, ["--install-completion"], prog_name="rootstock")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: cannot write {tmp_path / 'file' / 'home'}")
    assert "`rootstock --show-completion`" in line


def test_cache_without_a_command_lists_its_commands() -> None:
    result = CliRunner().invoke(app, ["cache"])
    assert {"stats", "clear", "du", "verify", "probe"} <= set(result.output.split())


@pytest.mark.parametrize("words", [["--version"], ["ls", "--help"], ["chat", "--help"]])
def test_a_command_imports_no_other(words: list[str]) -> None:
    """What serve needs takes longer to import than most commands take."""
    program = f"""
import sys
from server.terminal.cli import app
try:
    app({words!r}, prog_name="rootstock")
finally:
    assert not {{"fastapi", "engine.launch", "server.app"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)


REPORT = MachineReport(
    memory_bytes=16 * 2**30,
    left_bytes=8 * 2**30,
    advice="",
    mlx_version="1.2",
    mlx_lm_version="3.4",
    card=replace(
        CARD,
        name="tiny",
        arena_tokens=123_456,
        kv_format="q8",
        model_context_tokens=131_072,
        max_context_tokens=4_096,
    ),
    memory=ModelMemory(2**29, 2**30, 0, 2**28 + 2**27, 0, 2**30 + 2**29 + 2**28 + 2**27, 2**26),
)


def test_doctor_prints_a_problem_as_it_is_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    report = replace(
        REPORT, card=None, memory=None, problem="no [/bold] in models[0]; `rootstock pull` it"
    )
    monkeypatch.setattr("server.terminal.doctor.describe_machine", lambda config: report)
    result = CliRunner().invoke(app, ["doctor", "--model", "tiny"])
    assert (result.exit_code, result.stdout) == (1, "")
    said = "error: cannot serve tiny: no [/bold] in models[0]; `rootstock pull` it\n"
    assert result.stderr == said


def test_doctor_says_what_the_budget_comes_to() -> None:
    console = Console(record=True, width=100, file=StringIO())
    console.print(machine_table(REPORT, None))
    lines = console.export_text().splitlines()
    assert any("holds 123,456 tokens, q8" in line for line in lines)
    heads, sizes = (line.split() for line in lines[-2:])
    assert heads == [
        *("memory", "weights", "KV", "states", "workspace", "events", "process", "in", "all")
    ]
    assert " ".join(sizes) == "tiny 512 MiB 1.0 GiB - 384 MiB 64 MiB - 1.9 GiB"
    assert any("4,096 tokens of the model's 131,072" in line for line in lines)
    assert not any("problem" in line or "advice" in line for line in lines)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        (
            ArrayCounts(fixed=600, of_state=96, states=160, state_tokens=512, most=499_000),
            "1,000 tokens of a prompt take 192, of 2 saved states of 96 arrays; at most 15,960 are "
            "kept, 3.2% of the 499,000 that a process may have",
        ),
        (
            ArrayCounts(fixed=600, of_state=0, states=0, state_tokens=512, most=499_000),
            "1,000 tokens of a prompt take none; at most 600 are kept, 0.1% of the 499,000 that a "
            "process may have",
        ),
    ],
)
def test_doctor_says_how_far_the_limit_of_buffers_is(arrays: ArrayCounts, said: str) -> None:
    console = Console(record=True, width=400, file=StringIO())
    console.print(machine_table(replace(REPORT, arrays=arrays), None))
    (line,) = [each for each in console.export_text().splitlines() if "buffers" in each]
    assert said in line


def test_doctor_says_what_the_chat_template_takes() -> None:
    console = Console(record=True, width=400, file=StringIO())
    console.print(machine_table(REPORT, TemplateTraits(content="parts", late_system="user")))
    (line,) = [each for each in console.export_text().splitlines() if "chat template" in each]
    assert "content parts, system system, late_system user, " in line
    assert "call_ids any, tools declared" in line


def test_doctor_shows_the_times_of_attentions_and_why_one_has_none() -> None:
    found = AttentionTrial(
        "32 heads over 8 KV heads of 128",
        TrialState.PASSED,
        cells=(
            TimedCell(1, 1024, {"gather": 0.05, "paged": 0.049}),
            TimedCell(8, 8192, {"gather": 3.51, "paged": 0.2, "cascade": 1.37}),
        ),
        rejected={"paged wide": "it is wrong by 7.0% of the output's size"},
    )
    failed = AttentionTrial("other layers", TrialState.FAILED, "its process ended: SIGSEGV")
    console = Console(record=True, width=160, file=StringIO())
    console.print(machine_table(replace(REPORT, attention=(found, failed)), None))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    at = lines.index("rows x keys gather paged cascade serves")
    assert lines[at + 1 :] == [
        "1 x 1,024 0.05 0.049 - gather",  # less than 5% faster
        "8 x 8,192 3.51 0.2 1.37 paged",
        "attention other layers: its process ended: SIGSEGV",
    ]
    assert "32 heads over 8 KV heads of 128" in lines[at - 1]
    assert "not paged wide: it is wrong by 7.0% of the output's size" in lines[at - 1]


MEASURED = Measurements(
    (
        Section(
            "machine",
            "The device.",
            (
                MeasuredCase("machine", {"cores": 2}, 0.1),
                MeasuredCase("model", {}, 0, "none | here"),
            ),
            1.0,
        ),
        Section(
            "step",
            "A step.",
            (
                MeasuredCase("1 x 256", {"engine_ms": 1.23456, "kind": "gather"}, 0.5),
                MeasuredCase("8 x 256", {}, 0.1, "MemoryError: it takes 6.0 GiB"),
            ),
            2.0,
            "no time for more than 2 of 6 cases",
        ),
    ),
    3.0,
)


def test_doctor_writes_its_measurements_for_people_and_for_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[MeasureConfig]()

    def measure(config: MeasureConfig, report: Callable[[str], None]) -> Measurements:
        asked.append(config)
        report("step, at most 91 s")
        return MEASURED

    monkeypatch.setattr("server.terminal.doctor.take_measurements", measure)
    arguments = ["doctor", "--measure", "--into", str(tmp_path), "--max-running", "7"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "step, at most 91 s" in result.stdout.splitlines()
    assert [config.engine.max_running for config in asked] == [7]
    text = (tmp_path / "rootstock-measurements.md").read_text("utf-8")
    assert "| case | engine ms | kind | problem |" in text
    assert "| 1 x 256 | 1.23 | gather |  |" in text
    assert "| 8 x 256 |  |  | MemoryError: it takes 6.0 GiB |" in text
    assert "2 s; no time for more than 2 of 6 cases." in text
    stored = json.loads((tmp_path / "rootstock-measurements.json").read_text("utf-8"))
    assert stored["sections"][1]["cases"][0]["figures"] == {"engine_ms": 1.23456, "kind": "gather"}


def test_measurements_that_have_nowhere_to_go_are_not_begun(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--measure", "--into", str(tmp_path / "missing")])
    assert result.exit_code == 2
    assert "is no folder that can be written to" in result.stderr


def test_cases_that_say_different_things_are_lists() -> None:
    machine = MEASURED.sections[0]
    model = MeasuredCase("model", {"weights_gib": 17.21, "windows": ""}, 0.1)
    found = Measurements((replace(machine, cases=(*machine.cases[:1], model)),), 1.0)
    assert to_markdown(found).splitlines()[-6:-2] == [
        "  - cores: 2",
        "- model",
        "  - weights gib: 17.2",
        "  - windows: -",
    ]
