"""The coding agents that `rootstock launch` can start, and how each is pointed at a server.

A setup is environment and arguments of one process, and files in a folder of ours: no agent's own
files are read or written. Variables for other providers are unset, so that none of the user's keys
is sent to this server, and no agent uses another.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import httpx

from server.terminal.installed import codex_catalog, knows_flag

MOST_ANSWER_TOKENS = 32_000  # the limit of Claude Code and OpenCode
ROOM_TOKENS = 4_000  # after the first request: for answers, and for the first tools' results
EXTENSIONS = Path(__file__).with_name("extensions")


@dataclass(frozen=True, slots=True)
class Target:
    """A model of a server, as an agent is pointed at it.

    The base URL ends in /v1; the key is never empty, because agents ask for one even where the
    server does not. `context_tokens` is None where the server does not report it. `folder` holds
    our files for agents, and is of this server and model alone.
    """

    base_url: str
    model: str
    api_key: str
    context_tokens: int | None
    folder: Path

    @property
    def root_url(self) -> str:
        """The base URL without /v1."""
        return self.base_url.removesuffix("/v1")

    @property
    def answer_tokens(self) -> int | None:
        """The limit of an answer, which leaves most of the context to the prompt. None where the
        context is not known.
        """
        if self.context_tokens is None:
            return None
        return min(MOST_ANSWER_TOKENS, self.context_tokens // 4)


@dataclass(frozen=True, slots=True)
class Setup:
    """The environment of a process (None unsets a variable), its first arguments, and the files
    that are written before it starts.
    """

    variables: Mapping[str, str | None]
    arguments: tuple[str, ...] = ()
    files: Mapping[Path, str] = field(default_factory=dict)

    def with_arguments(self, *arguments: str) -> "Setup":
        """The setup with arguments after its own."""
        return replace(self, arguments=(*self.arguments, *arguments))


Adapt = Callable[[str, Target, Setup], Setup]
"""Adapts a setup to the installed program, whose path is the first argument."""


@dataclass(frozen=True, slots=True)
class Agent:
    """A coding agent: its command, where it comes from (the end of a sentence), and its setup.
    `adapt` adapts the setup to the version that is installed.

    `first_request_tokens` is the length of a terminal session's first prompt, rounded up; None
    where it has not been measured. docs/clients.md has the versions.
    """

    command: str
    origin: str
    setup: Callable[[Target], Setup]
    first_request_tokens: int | None
    adapt: Adapt | None = None
    usual_arguments: tuple[str, ...] = ()  # used where the user gives none
    calls_tools: bool = True

    @property
    def least_context_tokens(self) -> int:
        """The shortest context in which a session works; 0 where that is not known."""
        if self.first_request_tokens is None:
            return 0
        return self.first_request_tokens + ROOM_TOKENS


NO_OPENAI_ACCOUNT: Mapping[str, None] = MappingProxyType(
    dict.fromkeys(
        (
            "OPENAI_CUSTOM_HEADERS",
            "OPENAI_ORGANIZATION",
            "OPENAI_ORG_ID",
            "OPENAI_PROJECT",
            "OPENAI_PROJECT_ID",
        )
    )
)


def claude_code(target: Target) -> Setup:
    """https://code.claude.com/docs/en/env-vars"""
    ours = {
        "ANTHROPIC_BASE_URL": target.root_url,
        "ANTHROPIC_AUTH_TOKEN": target.api_key,
        "ANTHROPIC_MODEL": target.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": target.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": target.model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": target.model,
        "CLAUDE_CODE_SUBAGENT_MODEL": target.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # differs between sessions, so nothing is shared
    }
    others = (
        "ANTHROPIC_API_KEY",
        "ANTHROPIC_CUSTOM_HEADERS",
        "ANTHROPIC_SMALL_FAST_MODEL",
        "CLAUDE_CODE_OAUTH_TOKEN",
        "CLAUDE_CODE_USE_BEDROCK",
        "CLAUDE_CODE_USE_FOUNDRY",
        "CLAUDE_CODE_USE_VERTEX",
    )
    if target.context_tokens is not None:
        ours["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(target.context_tokens)
        ours["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(target.answer_tokens)
    return Setup({**dict.fromkeys(others), **ours})


def newer_claude_code(program: str, target: Target, setup: Setup) -> Setup:
    """The setup with the flag that moves text about the folder after the tools, so that sessions in
    other folders share the tools. Only if this version has it: an unknown flag would end the
    program.
    """
    flag = "--exclude-dynamic-system-prompt-sections"
    return setup.with_arguments(flag) if knows_flag(program, flag) else setup


def codex(target: Target) -> Setup:
    """https://developers.openai.com/codex/config-reference

    Its values are TOML, whose strings are as JSON's. The key is passed by its variable's name, so
    `ps` does not show it.
    """
    provider = {
        "name": "Rootstock",
        "base_url": target.base_url,
        "env_key": "OPENAI_API_KEY",
        "wire_api": "responses",
    }
    config: dict[str, str | int] = {
        "model": target.model,
        "model_provider": "rootstock",
        **{f"model_providers.rootstock.{name}": value for name, value in provider.items()},
    }
    if target.context_tokens is not None:
        config["model_context_window"] = target.context_tokens
    pairs = [f"{name}={_json(value)}" for name, value in config.items()]
    return Setup(
        {**NO_OPENAI_ACCOUNT, "OPENAI_API_KEY": target.api_key},
        tuple(argument for pair in pairs for argument in ("-c", pair)),
    )


def newer_codex(program: str, target: Target, setup: Setup) -> Setup:
    """The setup with a catalog that describes the model, if this version accepts one: Codex warns
    of unknown models.
    """
    catalog = codex_catalog(program, target.model, target.context_tokens)
    if catalog is None:
        return setup
    file = target.folder / "codex.json"
    described = setup.with_arguments("-c", f"model_catalog_json={_json(str(file))}")
    return replace(described, files={**setup.files, file: catalog})


def opencode(target: Target) -> Setup:
    """https://opencode.ai/docs/config/ and https://opencode.ai/docs/providers/"""
    model: dict[str, object] = {"name": target.model}
    if target.context_tokens is not None:
        model["limit"] = {
            "context": target.context_tokens,
            "output": target.answer_tokens,
        }
    plugin = target.folder / "opencode.js"
    config = {
        "model": f"rootstock/{target.model}",
        "small_model": f"rootstock/{target.model}",
        "plugin": [plugin.as_uri()],
        "provider": {
            "rootstock": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Rootstock",
                "options": {"baseURL": target.base_url, "apiKey": target.api_key},
                "models": {target.model: model},
            }
        },
    }
    # OpenCode waits for an installation from npm before it loads a plugin, once in its life, and
    # without a network at every start: 75 seconds, with npm's retries.
    return Setup(
        {"OPENCODE_CONFIG_CONTENT": _json(config), "npm_config_fetch_retries": "0"},
        files={plugin: _extension("opencode.js")},
    )


def aider(target: Target) -> Setup:
    """https://aider.chat/docs/config/options.html

    A project's .env replaces variables; what aider sets itself comes later. litellm, which it uses,
    reads OPENAI_BASE_URL before OPENAI_API_BASE.
    """
    return Setup(
        {
            **NO_OPENAI_ACCOUNT,
            "AIDER_OPENAI_API_BASE": target.base_url,
            "AIDER_OPENAI_API_KEY": target.api_key,
        },
        (
            *("--set-env", f"OPENAI_BASE_URL={target.base_url}"),
            *("--model", f"openai/{target.model}", "--no-show-model-warnings"),
        ),
    )


def qwen_code(target: Target) -> Setup:
    """https://qwenlm.github.io/qwen-code-docs/en/users/configuration/auth/

    Its automatic memory names the folder before the tools, and has a request of its own after each
    answer. Here it is off unless the user's own settings say otherwise: ours are defaults.
    """
    defaults = target.folder / "qwen.json"
    return Setup(
        {
            **NO_OPENAI_ACCOUNT,
            "OPENAI_BASE_URL": target.base_url,
            "OPENAI_API_KEY": target.api_key,
            "OPENAI_MODEL": target.model,
            "QWEN_CODE_SYSTEM_DEFAULTS_PATH": str(defaults),
        },
        ("--auth-type", "openai", f"--model={target.model}"),  # a name may begin with a dash
        files={defaults: _json({"memory": {"enableManagedAutoMemory": False}})},
    )


def copilot(target: Target) -> Setup:
    """`copilot help providers`"""
    ours = {
        "COPILOT_PROVIDER_TYPE": "openai",
        "COPILOT_PROVIDER_BASE_URL": target.base_url,
        "COPILOT_PROVIDER_API_KEY": target.api_key,
        "COPILOT_PROVIDER_WIRE_API": "completions",
        "COPILOT_MODEL": target.model,
    }
    others = (
        "COPILOT_PROVIDER_API_KEY_COMMAND",
        "COPILOT_PROVIDER_BEARER_TOKEN",
        "COPILOT_PROVIDER_HEADERS",
    )
    if target.context_tokens is not None:
        ours["COPILOT_PROVIDER_MAX_PROMPT_TOKENS"] = str(target.context_tokens)
    return Setup({**dict.fromkeys(others), **ours})


def goose(target: Target) -> Setup:
    """https://goose-docs.ai/docs/guides/environment-variables"""
    url = httpx.URL(target.base_url)
    ours = {
        "GOOSE_PROVIDER": "openai",
        "GOOSE_MODEL": target.model,
        "OPENAI_HOST": str(url.copy_with(path="/")).rstrip("/"),
        "OPENAI_BASE_PATH": f"{url.path.strip('/')}/chat/completions",
        "OPENAI_API_KEY": target.api_key,
    }
    if target.context_tokens is not None:
        ours["GOOSE_CONTEXT_LIMIT"] = str(target.context_tokens)
    return Setup({**NO_OPENAI_ACCOUNT, **ours})


def pi(target: Target) -> Setup:
    """https://pi.dev/docs/latest/custom-provider

    An extension of ours adds a provider to the user's own. A name after a slash is no flag.
    """
    model: dict[str, object] = {
        "id": target.model,
        "name": target.model,
        "reasoning": False,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    if target.context_tokens is not None:
        model["contextWindow"] = target.context_tokens
        model["maxTokens"] = target.answer_tokens
    provider = {
        "name": "Rootstock",
        "baseUrl": target.base_url,
        "api": "openai-completions",
        "apiKey": target.api_key,
        "models": [model],
    }
    extension = target.folder / "pi.js"
    return Setup(
        {},
        ("--extension", str(extension), "--model", f"rootstock/{target.model}"),
        files={extension: f"const provider = {_json(provider)};\n{_extension('pi.js')}"},
    )


def cline(target: Target) -> Setup:
    """The file that `cline auth --provider openai --baseurl URL` writes, in a place of ours."""
    provider: dict[str, str | int] = {
        "provider": "openai-compatible",
        "apiKey": target.api_key,
        "model": target.model,
        "baseUrl": target.base_url,
    }
    if target.context_tokens is not None:
        provider["contextWindow"] = target.context_tokens
    entry = {"settings": provider, "updatedAt": "1970-01-01T00:00:00.000Z", "tokenSource": "manual"}
    settings = {
        "version": 1,
        "lastUsedProvider": "openai-compatible",
        "modes": {},
        "providers": {"openai-compatible": entry},
    }
    file = target.folder / "cline.json"
    return Setup({"CLINE_PROVIDER_SETTINGS_PATH": str(file)}, files={file: _json(settings)})


def crush(target: Target) -> Setup:
    """https://github.com/charmbracelet/crush/blob/main/docs/config/README.md

    What Crush keeps of its own choices (CRUSH_GLOBAL_DATA) wins over the user's configuration, and
    that is a file of ours. It runs what looks like shell in a URL or a key, so both are variables.
    """
    model: dict[str, str | int | None] = {"id": target.model, "name": target.model}
    if target.context_tokens is not None:
        model["context_window"] = target.context_tokens
        model["default_max_tokens"] = target.answer_tokens
    provider = {
        "name": "Rootstock",
        "type": "openai-compat",
        "base_url": "$CRUSH_ROOTSTOCK_URL",
        "api_key": "$CRUSH_ROOTSTOCK_KEY",
        "models": [model],
    }
    chosen = {"model": target.model, "provider": "rootstock"}
    config = {
        "providers": {"rootstock": provider},
        "models": {"large": chosen, "small": chosen},
    }
    folder = target.folder / "crush"
    return Setup(
        {
            "CRUSH_GLOBAL_DATA": str(folder),
            "CRUSH_ROOTSTOCK_URL": target.base_url,
            "CRUSH_ROOTSTOCK_KEY": target.api_key,
        },
        files={folder / "crush.json": _json(config)},
    )


def _extension(name: str) -> str:
    """JavaScript for an agent, with the function that moves text about the folder."""
    return "\n".join((EXTENSIONS / file).read_text() for file in ("prompt_order.js", name))


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _npm(package: str) -> str:
    return f"`npm install -g {package}` brings it"


_AGENTS = (
    Agent(
        "claude",
        _npm("@anthropic-ai/claude-code"),
        claude_code,
        first_request_tokens=22_000,
        adapt=newer_claude_code,
    ),
    Agent(
        "codex",
        _npm("@openai/codex"),
        codex,
        first_request_tokens=12_000,
        adapt=newer_codex,
    ),
    Agent("opencode", _npm("opencode-ai"), opencode, first_request_tokens=8_000),
    Agent(
        "aider",
        "`uv tool install aider-chat` brings it",
        aider,
        first_request_tokens=1_000,
        calls_tools=False,  # edits are part of its answers' text
    ),
    Agent("qwen", _npm("@qwen-code/qwen-code"), qwen_code, first_request_tokens=20_000),
    Agent("copilot", _npm("@github/copilot"), copilot, first_request_tokens=12_000),
    Agent("pi", _npm("@earendil-works/pi-coding-agent"), pi, first_request_tokens=2_000),
    Agent("cline", _npm("cline"), cline, first_request_tokens=6_000),
    Agent("crush", _npm("@charmland/crush"), crush, first_request_tokens=None),
    Agent(
        "goose",
        "https://goose-docs.ai/docs/getting-started/installation says how to install it",
        goose,
        first_request_tokens=None,
        usual_arguments=("session",),
    ),
)

AGENTS: Mapping[str, Agent] = MappingProxyType({agent.command: agent for agent in _AGENTS})
"""The agents by their commands."""
