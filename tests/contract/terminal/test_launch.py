"""`rootstock launch`: what a program on the PATH gets, from a daemon on a real socket."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from server.settings import Settings
from server.terminal.agents import AGENTS
from server.terminal.cli import app
from server.terminal.installed import codex_catalog
from tests.contract.canned_server import canned
from tests.contract.daemon import running
from tests.contract.fake_engine import CARD, FakeEngine
from tests.contract.ollama.scripted import write_checkpoint

pytestmark = pytest.mark.process

AGENT = f"""\
#!{sys.executable}
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]))
"""
"""Stands in for an agent: says with what it was started."""

DYNAMIC_SECTIONS = "--exclude-dynamic-system-prompt-sections"
SPACIOUS = replace(CARD, max_context_tokens=40_000, arena_tokens=40_000)


@pytest.fixture(scope="module")
def url(no_settings_from_outside: None) -> Iterator[str]:
    """Of a model with a context that agents can work in."""
    with running(FakeEngine(card=SPACIOUS), Settings(port=0)) as root:
        yield f"{root}/v1"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files of ours go. The name is one that a shell would take apart."""
    folder = tmp_path / "it's $HOME"
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    return folder


Started = tuple[list[str], dict[str, str]]
"""An agent's arguments and environment."""


def started(
    command: list[str], agent: str, directory: Path, variables: Mapping[str, str]
) -> Started:
    """With the stand-in as the agent."""
    program = directory / agent
    program.write_text(AGENT)
    program.chmod(0o755)
    path = f"{directory}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **variables, "PATH": path},
    )
    assert ended.returncode == 0, ended.stderr
    arguments, environment = json.loads(ended.stdout)
    return arguments, environment


def launched(agent: str, directory: Path, *options: str, **variables: str) -> Started:
    """By a shell, from what `--print` shows."""
    script = shown(agent, "--print", *options, **variables).stdout
    return started(["sh", "-c", script], agent, directory, variables)


def shown(*arguments: str, **variables: str) -> Result:
    return CliRunner().invoke(app, ["launch", *arguments], env=variables)


def test_claude_code_gets_this_daemon_for_every_model(url: str, model: str, tmp_path: Path) -> None:
    arguments, environment = launched(
        "claude",
        tmp_path,
        *("--url", url, "--"),
        "--continue",
        "-p",
        "Say hi",
        ANTHROPIC_API_KEY="sk-real",
        CLAUDE_CODE_USE_BEDROCK="1",
    )
    assert arguments == ["--continue", "-p", "Say hi"]
    assert environment["ANTHROPIC_BASE_URL"] == url.removesuffix("/v1")
    assert environment["ANTHROPIC_AUTH_TOKEN"] == "none"
    names = {name for name, value in environment.items() if value == model}
    assert {"ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL"} <= names
    assert {"CLAUDE_CODE_SUBAGENT_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL"} <= names
    assert "ANTHROPIC_API_KEY" not in environment
    assert "CLAUDE_CODE_USE_BEDROCK" not in environment
    assert environment["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"


def test_an_agent_without_arguments_gets_its_usual_ones(url: str, tmp_path: Path) -> None:
    assert launched("goose", tmp_path, "--url", url)[0] == ["session"]
    assert launched("goose", tmp_path, "--url", url, "--", "run", "-t", "hi")[0][0] == "run"


def test_files_are_for_their_owner_alone_and_each_server_has_its_own(
    url: str, state: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "server", "launch", "cline", "--url", url]
    started(command, "cline", tmp_path, {})
    with running(FakeEngine(card=SPACIOUS), Settings(port=0)) as another:
        for server in (url, f"{another}/v1"):
            launched("cline", tmp_path, "--url", server)
    files = [path for path in state.rglob("*") if path.is_file()]
    assert [path.name for path in files] == ["cline.json", "cline.json"]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_a_folder_that_cannot_be_written(url: str, state: Path, tmp_path: Path) -> None:
    state.write_text("a file")
    program = tmp_path / "pi"
    program.write_text(AGENT)
    program.chmod(0o755)
    result = shown("pi", "--url", url, PATH=str(tmp_path))
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {state}")


@pytest.mark.parametrize(("knows", "flags"), [(DYNAMIC_SECTIONS, [DYNAMIC_SECTIONS]), ("", [])])
def test_claude_code_gets_a_flag_where_its_version_has_it(
    knows: str, flags: list[str], url: str, tmp_path: Path
) -> None:
    program = tmp_path / "claude"
    program.write_text(f"#!/bin/sh\necho '  {knows}  Share more'\n")
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    script = shown("claude", "--url", url, "--print", "--", "-p", "hi", PATH=path).stdout
    assert shlex.split(script.splitlines()[-1]) == ["claude", *flags, "-p", "hi"]


CODEX = f"""\
#!{sys.executable}
import json, os, sys, urllib.request
arguments = sys.argv[1:]
config = dict(pair.split("=", 1) for pair in arguments if "=" in pair)
if arguments[:2] == ["debug", "models"]:
    models = json.load(open(json.loads(config["model_catalog_json"])))["models"]
    sys.exit(KNOWS_NO_CATALOG or not models[0]["base_instructions"])
if config["model_provider"] == '"recorder"':
    assert os.environ["CODEX_HOME"] != os.environ.get("HOME")
    url = json.loads(config["model_providers.recorder.base_url"]) + "/responses"
    try:
        urllib.request.urlopen(url, data=json.dumps(FIRST_REQUEST).encode())
    except urllib.error.HTTPError as error:
        sys.exit(error.code)
print(json.dumps([arguments, dict(os.environ)]))
"""
"""Stands in for Codex, which sends its instructions with a session's first request."""

INSTRUCTIONS = "You are a coding agent."
AS_A_MESSAGE = {"role": "developer", "content": [{"type": "input_text", "text": INSTRUCTIONS}]}


def codex(folder: Path, first_request: object, *, knows_no_catalog: bool = False) -> str:
    """The stand-in's path."""
    program = folder / "codex"
    text = CODEX.replace("FIRST_REQUEST", repr(first_request))
    program.write_text(text.replace("KNOWS_NO_CATALOG", str(knows_no_catalog)))
    program.chmod(0o755)
    return str(program)


def test_codex_gets_a_catalog_with_the_model_and_its_own_instructions(
    url: str, model: str, tmp_path: Path
) -> None:
    codex(tmp_path, {"input": [AS_A_MESSAGE, AS_A_MESSAGE]})
    ended = subprocess.run(
        [sys.executable, "-m", "server", "launch", "codex", "--url", url],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
    )
    assert ended.returncode == 0, ended.stderr
    arguments, _ = json.loads(ended.stdout)
    config = dict(pair.split("=", 1) for pair in arguments[1::2])
    (entry,) = json.loads(Path(json.loads(config["model_catalog_json"])).read_text())["models"]
    assert (entry["slug"], entry["base_instructions"]) == (model, INSTRUCTIONS)
    assert entry["context_window"] == entry["max_context_window"] == 40_000


def test_codex_is_not_described_to_itself_where_that_cannot_be(tmp_path: Path) -> None:
    said = {"instructions": INSTRUCTIONS, "input": []}
    described = codex_catalog(codex(tmp_path, said), "m", None)
    assert described is not None
    assert json.loads(described)["models"][0]["base_instructions"] == INSTRUCTIONS
    assert codex_catalog(codex(tmp_path, {"input": []}), "m", None) is None
    assert codex_catalog(codex(tmp_path, said, knows_no_catalog=True), "m", None) is None


def test_a_model_that_can_call_no_tools(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "{{ messages[0].content }}")
    settings = Settings(port=0, model=(str(checkpoint),), served_model_name=("m",))
    without = settings.model_copy(update={"tool_parser": "none"})
    with running(FakeEngine(card=SPACIOUS), settings) as root:
        assert shown("claude", "--url", f"{root}/v1", "--print").exit_code == 0
    with running(FakeEngine(card=SPACIOUS), without) as root:
        there = ("--url", f"{root}/v1", "--print")
        refused = shown("claude", *there)
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert refused.stderr == (
            "error: claude works through tools, and m can call none. Serve another model "
            "(`rootstock serve --model`), or try it with --force\n"
        )
        assert shown("claude", *there, "--force").exit_code == 0
        assert shown("aider", *there).exit_code == 0


def test_a_context_must_be_long_enough_where_it_is_known() -> None:
    too_short = (
        "error: claude begins with about 22,000 tokens and needs a context of 26,000; m has 4,096. "
        "Serve a model with more (`rootstock serve --model`), or try it with --force\n"
    )
    with canned(models={"data": [{"id": "m", "max_model_len": 4096}]}) as server:
        for options in ((), ("--print",)):
            result = shown("claude", "--url", server.url, *options)
            assert (result.exit_code, result.stdout, result.stderr) == (1, "", too_short)
        assert shown("claude", "--url", server.url, "--print", "--force").exit_code == 0
        assert shown("goose", "--url", server.url, "--print").exit_code == 0
    for context in ({"max_model_len": 26_000}, {}):
        with canned(models={"data": [{"id": "m", **context}]}) as server:
            assert shown("claude", "--url", server.url, "--print").exit_code == 0


def test_the_daemon_that_runs_and_its_key(tmp_path: Path) -> None:
    with running(FakeEngine(card=SPACIOUS), Settings(port=0, api_key="k")) as base_url:
        port = base_url.rpartition(":")[2]
        _, environment = launched("claude", tmp_path, ROOTSTOCK_PORT=port, ROOTSTOCK_API_KEY="k")
    assert environment["ANTHROPIC_BASE_URL"] == base_url
    assert environment["ANTHROPIC_AUTH_TOKEN"] == "k"


def test_launch_does_what_a_shell_does_with_what_is_printed(url: str, tmp_path: Path) -> None:
    options = ("--url", url, "--", "a b", "$HOME'")
    theirs = {"ANTHROPIC_API_KEY": "sk-real", "ROOTSTOCK_PORT": "8000"}
    command = [sys.executable, "-m", "server", "launch", "claude", *options]
    direct = started(command, "claude", tmp_path, theirs)
    shell = launched("claude", tmp_path, *options, **theirs)
    assert direct[0] == shell[0] == ["a b", "$HOME'"]
    assert drop(direct[1], OF_THE_SHELL) == drop(shell[1], OF_THE_SHELL)


OF_THE_SHELL = {"_", "PWD", "OLDPWD", "SHLVL"}


def drop(variables: dict[str, str], names: set[str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


def test_a_context_is_passed_on_where_the_server_tells_it() -> None:
    models = {"data": [{"id": "m", "max_model_len": 40_000}]}
    with canned(models=models) as server:
        claude = shown("claude", "--url", server.url, "--print").stdout
        codex = shown("codex", "--url", server.url, "--print").stdout
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS=40000\n" in claude
    assert "CLAUDE_CODE_MAX_OUTPUT_TOKENS=10000\n" in claude
    assert "-c model_context_window=40000" in codex


def test_a_model_that_is_not_served(url: str, model: str) -> None:
    result = shown("claude", "--url", url, "--model", "other", "--print")
    assert result.exit_code == 1
    assert result.stderr == f"error: other is not served there, but {model}\n"


def test_a_models_name_is_data_to_the_shell() -> None:
    with canned(models={"data": [{"id": "$(touch x); m'"}]}) as server:
        lines = shown("claude", "--url", server.url, "--print").stdout.splitlines()
    assert """export ANTHROPIC_MODEL='$(touch x); m'"'"''""" in lines
    with canned(models={"data": [{"id": "a\nb"}]}) as server:
        assert "control characters" in shown("claude", "--url", server.url, "--print").stderr


def test_a_models_name_is_no_option_of_the_agent() -> None:
    with canned(models={"data": [{"id": "--yolo", "max_model_len": 40_000}]}) as server:
        for agent in AGENTS:
            line = shown(agent, "--url", server.url, "--print").stdout.splitlines()[-1]
            assert "--yolo" not in shlex.split(line), agent


def test_an_agent_that_is_not_installed(url: str) -> None:
    result = shown("codex", "--url", url, PATH="/no/such")
    assert result.exit_code == 1
    assert "no codex on the PATH; `npm install -g @openai/codex` brings it" in result.stderr
    result = shown("goose", "--url", url, PATH="/no/such")
    assert result.stderr == (
        "error: there is no goose on the PATH; "
        "https://goose-docs.ai/docs/getting-started/installation says how to install it\n"
    )


def test_an_agent_that_nobody_knows() -> None:
    result = shown("nobody")
    assert result.exit_code == 2
    assert "nobody is none of claude, codex, " in result.stderr
