"""`rootstock launch`: what a program on the PATH gets, from a daemon on a real socket."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from typer.testing import CliRunner, Result

from server.settings import Settings
from server.terminal.agents import AGENTS
from server.terminal.cli import app
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


def test_codex_gets_a_provider_in_its_arguments(url: str, model: str, tmp_path: Path) -> None:
    arguments, environment = launched("codex", tmp_path, "--url", url, "--", "exec", "Say hi")
    flags, pairs = arguments[:-2:2], arguments[1:-2:2]
    config = {name: json.loads(value) for name, _, value in (p.partition("=") for p in pairs)}
    assert set(flags) == {"-c"}
    assert config == {
        "model": model,
        "model_context_window": SPACIOUS.max_context_tokens,
        "model_provider": "rootstock",
        "model_providers.rootstock.name": "Rootstock",
        "model_providers.rootstock.base_url": url,
        "model_providers.rootstock.env_key": "OPENAI_API_KEY",
        "model_providers.rootstock.wire_api": "responses",
    }
    assert environment["OPENAI_API_KEY"] == "none"
    assert arguments[-2:] == ["exec", "Say hi"]


def test_opencode_gets_its_configuration_in_a_variable(
    url: str, model: str, tmp_path: Path
) -> None:
    arguments, environment = launched("opencode", tmp_path, "--url", url)
    config = json.loads(environment["OPENCODE_CONFIG_CONTENT"])
    assert arguments == []
    assert config["model"] == f"rootstock/{model}"
    provider = config["provider"]["rootstock"]
    assert provider["options"] == {"baseURL": url, "apiKey": "none"}
    assert list(provider["models"]) == [model]
    (plugin,) = config["plugin"]
    assert "withFolderAfterTools" in Path(unquote(urlsplit(plugin).path)).read_text()


@pytest.mark.parametrize(
    ("agent", "variables", "arguments"),
    [
        (
            "aider",
            {"AIDER_OPENAI_API_BASE": "{url}", "AIDER_OPENAI_API_KEY": "none"},
            [
                *("--set-env", "OPENAI_BASE_URL={url}"),
                *("--model", "openai/{model}", "--no-show-model-warnings"),
            ],
        ),
        (
            "qwen",
            {"OPENAI_BASE_URL": "{url}", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "{model}"},
            ["--auth-type", "openai", "--model={model}"],
        ),
        (
            "copilot",
            {
                "COPILOT_PROVIDER_BASE_URL": "{url}",
                "COPILOT_PROVIDER_API_KEY": "none",
                "COPILOT_MODEL": "{model}",
            },
            [],
        ),
    ],
)
def test_agents_that_take_a_base_url(
    agent: str,
    variables: dict[str, str],
    arguments: list[str],
    url: str,
    model: str,
    tmp_path: Path,
) -> None:
    theirs = {"OPENAI_API_KEY": "sk-real", "OPENAI_ORGANIZATION": "org"}
    given, environment = launched(agent, tmp_path, "--url", url, **theirs)
    names = {"url": url, "model": model}
    assert given == [argument.format(**names) for argument in arguments]
    expected = {name: value.format(**names) for name, value in variables.items()}
    assert expected.items() <= environment.items()
    assert agent == "copilot" or "OPENAI_ORGANIZATION" not in environment


def test_qwen_code_gets_defaults_that_leave_the_folder_out(url: str, tmp_path: Path) -> None:
    _, environment = launched("qwen", tmp_path, "--url", url)
    defaults = json.loads(Path(environment["QWEN_CODE_SYSTEM_DEFAULTS_PATH"]).read_text())
    assert defaults == {"memory": {"enableManagedAutoMemory": False}}


def test_goose_gets_host_and_path_apart_and_a_session(url: str, model: str, tmp_path: Path) -> None:
    arguments, environment = launched("goose", tmp_path, "--url", url)
    assert arguments == ["session"]
    assert environment["OPENAI_HOST"] == url.removesuffix("/v1")
    assert environment["OPENAI_BASE_PATH"] == "v1/chat/completions"
    assert (environment["GOOSE_PROVIDER"], environment["GOOSE_MODEL"]) == ("openai", model)
    assert launched("goose", tmp_path, "--url", url, "--", "run", "-t", "hi")[0][0] == "run"


def test_pi_gets_an_extension_that_adds_a_provider(url: str, model: str, tmp_path: Path) -> None:
    arguments, _ = launched("pi", tmp_path, "--url", url, "--", "-p", "Say hi")
    assert arguments[::2] == ["--extension", "--model", "-p"]
    assert arguments[3::2] == [f"rootstock/{model}", "Say hi"]
    provider, _, extension = Path(arguments[1]).read_text().partition(";\n")
    assert "withFolderAfterTools(payload, cwd)" in extension
    config = json.loads(provider.removeprefix("const provider = "))
    assert (config["baseUrl"], config["apiKey"]) == (url, "none")
    (served,) = config["models"]
    assert (served["id"], served["contextWindow"], served["maxTokens"]) == (model, 40_000, 10_000)


def test_cline_gets_a_file_of_providers(url: str, model: str, tmp_path: Path) -> None:
    arguments, environment = launched("cline", tmp_path, "--url", url)
    config = json.loads(Path(environment["CLINE_PROVIDER_SETTINGS_PATH"]).read_text())
    assert arguments == []
    assert config["providers"][config["lastUsedProvider"]]["settings"] == {
        "provider": "openai-compatible",
        "apiKey": "none",
        "model": model,
        "baseUrl": url,
        "contextWindow": SPACIOUS.max_context_tokens,
    }


def test_crush_gets_choices_that_win_over_the_users(url: str, model: str, tmp_path: Path) -> None:
    arguments, environment = launched("crush", tmp_path, "--url", url)
    config = json.loads(Path(environment["CRUSH_GLOBAL_DATA"], "crush.json").read_text())
    provider = config["providers"]["rootstock"]
    assert arguments == []
    assert environment[provider["base_url"].removeprefix("$")] == url
    assert environment[provider["api_key"].removeprefix("$")] == "none"
    assert [served["id"] for served in provider["models"]] == [model]
    chosen = {"model": model, "provider": "rootstock"}
    assert config["models"] == {"large": chosen, "small": chosen}


@pytest.mark.parametrize("options", [(), ("--print",)])
def test_files_are_for_their_owner_alone_and_each_server_has_its_own(
    options: tuple[str, ...], url: str, state: Path, tmp_path: Path
) -> None:
    with running(FakeEngine(card=SPACIOUS), Settings(port=0)) as another:
        for server in (url, url, f"{another}/v1"):
            command = [sys.executable, "-m", "server", "launch", "cline", "--url", server]
            if options:
                command = ["sh", "-c", shown("cline", "--url", server, *options).stdout]
            started(command, "cline", tmp_path, {"XDG_STATE_HOME": str(state)})
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


@pytest.mark.parametrize(
    ("first_request", "knows_no_catalog", "is_described"),
    [
        ({"input": [AS_A_MESSAGE, AS_A_MESSAGE]}, False, True),
        ({"instructions": INSTRUCTIONS, "input": []}, False, True),
        ({"input": []}, False, False),
        ({"instructions": INSTRUCTIONS, "input": []}, True, False),
    ],
)
def test_codex_gets_a_catalog_with_the_model_and_its_own_instructions(
    first_request: object,
    knows_no_catalog: bool,
    is_described: bool,
    url: str,
    model: str,
    tmp_path: Path,
) -> None:
    program = tmp_path / "codex"
    text = CODEX.replace("FIRST_REQUEST", repr(first_request))
    program.write_text(text.replace("KNOWS_NO_CATALOG", str(knows_no_catalog)))
    program.chmod(0o755)
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
    assert ("model_catalog_json" in config) is is_described
    if is_described:
        (entry,) = json.loads(Path(json.loads(config["model_catalog_json"])).read_text())["models"]
        assert (entry["slug"], entry["base_instructions"]) == (model, INSTRUCTIONS)
        assert entry["context_window"] == entry["max_context_window"] == 40_000


def test_a_model_that_can_call_no_tools(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "{{ messages[0].content }}")
    settings = Settings(port=0, model=(str(checkpoint),), served_model_name=("m",))
    with running(FakeEngine(card=SPACIOUS), settings) as root:
        there = ("--url", f"{root}/v1", "--print")
        refused = shown("claude", *there)
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert refused.stderr == (
            "error: claude works through tools, and m can call none: its chat template has no "
            "place for them. Serve another model (`rootstock serve --model`), or try it with "
            "--force\n"
        )
        assert shown("claude", *there, "--force").exit_code == 0
        assert shown("aider", *there).exit_code == 0


@pytest.mark.parametrize("options", [(), ("--print",)])
def test_a_context_too_short_for_the_agent(options: tuple[str, ...]) -> None:
    with canned(models={"data": [{"id": "m", "max_model_len": 4096}]}) as server:
        result = shown("claude", "--url", server.url, *options)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == (
        "error: claude begins with about 22,000 tokens and needs a context of 26,000; m has 4,096. "
        "Serve a model with more (`rootstock serve --model`), or try it with --force\n"
    )


def test_a_context_that_is_long_enough_not_known_or_not_to_be_asked_about() -> None:
    for context in ({"max_model_len": 26_000}, {}):
        with canned(models={"data": [{"id": "m", **context}]}) as server:
            assert shown("claude", "--url", server.url, "--print").exit_code == 0
    with canned(models={"data": [{"id": "m", "max_model_len": 4096}]}) as server:
        assert shown("claude", "--url", server.url, "--print", "--force").exit_code == 0
        assert shown("goose", "--url", server.url, "--print").exit_code == 0


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


def test_no_daemon_runs() -> None:
    with running(FakeEngine(), Settings(port=0)) as gone:
        pass
    result = shown("claude", ROOTSTOCK_PORT=gone.rpartition(":")[2])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: no daemon runs at {gone}/v1; `rootstock serve` ")


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
