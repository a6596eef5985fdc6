"""The agents that `rootstock launch` can start, and their setup for a server.

A setup is environment and arguments of one process: no agent's own files are read or written.
Variables for other providers are unset, so that none of the user's keys is sent to this server, and
no agent uses another.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import httpx

MOST_ANSWER_TOKENS = 32_000  # what Claude Code and OpenCode allow an answer at most
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


@dataclass(frozen=True, slots=True)
class Target:
    """A model of a server. The base URL ends in /v1; a key is never empty, because agents ask for
    one even where the server does not. `context_tokens` is None where the server does not say.
    """

    base_url: str
    model: str
    api_key: str
    context_tokens: int | None

    @property
    def root_url(self) -> str:
        return self.base_url.removesuffix("/v1")


@dataclass(frozen=True, slots=True)
class Setup:
    """The environment of a process (None unsets a variable), and its first arguments."""

    variables: Mapping[str, str | None]
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Agent:
    """A coding agent: its command, how to install it, and its setup."""

    command: str
    install: str
    setup: Callable[[Target], Setup]
    usual_arguments: tuple[str, ...] = ()  # where the user gives none


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
        ours["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(_answer_tokens(target.context_tokens))
    return Setup({**dict.fromkeys(others), **ours})


def codex(target: Target) -> Setup:
    """https://developers.openai.com/codex/config-reference

    Its values are TOML, whose strings are as JSON's. The key is named, not shown to `ps`.
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
    pairs = [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in config.items()]
    return Setup(
        {**NO_OPENAI_ACCOUNT, "OPENAI_API_KEY": target.api_key},
        tuple(argument for pair in pairs for argument in ("-c", pair)),
    )


def opencode(target: Target) -> Setup:
    """https://opencode.ai/docs/config/ and https://opencode.ai/docs/providers/"""
    model: dict[str, object] = {"name": target.model}
    if target.context_tokens is not None:
        model["limit"] = {
            "context": target.context_tokens,
            "output": _answer_tokens(target.context_tokens),
        }
    config = {
        "model": f"rootstock/{target.model}",
        "small_model": f"rootstock/{target.model}",
        "provider": {
            "rootstock": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Rootstock",
                "options": {"baseURL": target.base_url, "apiKey": target.api_key},
                "models": {target.model: model},
            }
        },
    }
    return Setup({"OPENCODE_CONFIG_CONTENT": json.dumps(config, ensure_ascii=False)})


def aider(target: Target) -> Setup:
    """https://aider.chat/docs/config/options.html

    A project's .env replaces variables; what aider sets itself comes later. litellm, below it,
    asks for OPENAI_BASE_URL before OPENAI_API_BASE.
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
    """https://qwenlm.github.io/qwen-code-docs/en/users/configuration/auth/"""
    return Setup(
        {
            **NO_OPENAI_ACCOUNT,
            "OPENAI_BASE_URL": target.base_url,
            "OPENAI_API_KEY": target.api_key,
            "OPENAI_MODEL": target.model,
        },
        ("--auth-type", "openai", f"--model={target.model}"),  # a name may begin with a dash
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


AGENTS: Mapping[str, Agent] = MappingProxyType(
    {
        "claude": Agent("claude", "npm install -g @anthropic-ai/claude-code", claude_code),
        "codex": Agent("codex", "npm install -g @openai/codex", codex),
        "opencode": Agent("opencode", "npm install -g opencode-ai", opencode),
        "aider": Agent("aider", "uv tool install aider-chat", aider),
        "qwen": Agent("qwen", "npm install -g @qwen-code/qwen-code", qwen_code),
        "copilot": Agent("copilot", "npm install -g @github/copilot", copilot),
        "goose": Agent(
            "goose",
            "see https://goose-docs.ai/docs/getting-started/installation",
            goose,
            usual_arguments=("session",),
        ),
    }
)


def _answer_tokens(context_tokens: int) -> int:
    """A share that leaves most of the context to the prompt."""
    return min(MOST_ANSWER_TOKENS, context_tokens // 4)
