"""The agents that `rootstock launch` can start."""

from collections.abc import Mapping
from types import MappingProxyType

from server.terminal.launch import setups
from server.terminal.launch.agent import Agent

AGENTS: Mapping[str, Agent] = MappingProxyType(
    {
        "claude": Agent(
            "claude",
            "`npm install -g @anthropic-ai/claude-code` brings it",
            setups.claude_code,
            first_request_tokens=22_000,
        ),
        "codex": Agent(
            "codex",
            "`npm install -g @openai/codex` brings it",
            setups.codex,
            first_request_tokens=11_000,
        ),
        "opencode": Agent(
            "opencode",
            "`npm install -g opencode-ai` brings it",
            setups.opencode,
            first_request_tokens=8_000,
        ),
        "aider": Agent(
            "aider",
            "`uv tool install aider-chat` brings it",
            setups.aider,
            first_request_tokens=1_000,
        ),
        "qwen": Agent(
            "qwen",
            "`npm install -g @qwen-code/qwen-code` brings it",
            setups.qwen_code,
            first_request_tokens=20_000,
        ),
        "copilot": Agent(
            "copilot",
            "`npm install -g @github/copilot` brings it",
            setups.copilot,
            first_request_tokens=12_000,
        ),
        "pi": Agent(
            "pi",
            "`npm install -g @earendil-works/pi-coding-agent` brings it",
            setups.pi,
            first_request_tokens=2_000,
        ),
        "cline": Agent(
            "cline",
            "`npm install -g cline` brings it",
            setups.cline,
            first_request_tokens=6_000,
        ),
        "crush": Agent(
            "crush",
            "`npm install -g @charmland/crush` brings it",
            setups.crush,
            first_request_tokens=None,
        ),
        "goose": Agent(
            "goose",
            "https://goose-docs.ai/docs/getting-started/installation says how to install it",
            setups.goose,
            first_request_tokens=None,
            usual_arguments=("session",),
        ),
    }
)
