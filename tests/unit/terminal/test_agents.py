"""What each agent gets, and the JavaScript that moves text about the folder after the tools."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from server.terminal.agents import AGENTS, EXTENSIONS, Target

FOLDER = Path("/state/launch/abc")
TARGET = Target("http://127.0.0.1:8000/v1", "org/m", "key", 40_000, FOLDER)

URL, ROOT, MODEL = TARGET.base_url, TARGET.root_url, TARGET.model
NOBODY_ELSE = dict.fromkeys(("OPENAI_ORGANIZATION", "OPENAI_PROJECT", "OPENAI_CUSTOM_HEADERS"))
CODEX = {
    "model": MODEL,
    "model_provider": "rootstock",
    "model_providers.rootstock.name": "Rootstock",
    "model_providers.rootstock.base_url": URL,
    "model_providers.rootstock.env_key": "OPENAI_API_KEY",
    "model_providers.rootstock.wire_api": "responses",
    "model_context_window": 40_000,
}
CRUSH = {"model": MODEL, "provider": "rootstock"}

Given = tuple[dict[str, str | None], list[str]]
GIVEN: dict[str, Given] = {
    "claude": (
        {
            "ANTHROPIC_BASE_URL": ROOT,
            "ANTHROPIC_AUTH_TOKEN": "key",
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
            "ANTHROPIC_DEFAULT_OPUS_MODEL": MODEL,
            "CLAUDE_CODE_SUBAGENT_MODEL": MODEL,
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_USE_BEDROCK": None,
            "ANTHROPIC_API_KEY": None,
        },
        [],
    ),
    "codex": (
        {"OPENAI_API_KEY": "key", **NOBODY_ELSE},
        [part for name, value in CODEX.items() for part in ("-c", f"{name}={json.dumps(value)}")],
    ),
    "opencode": ({"npm_config_fetch_retries": "0"}, []),
    "aider": (
        {"AIDER_OPENAI_API_BASE": URL, "AIDER_OPENAI_API_KEY": "key", **NOBODY_ELSE},
        [
            *("--set-env", f"OPENAI_BASE_URL={URL}"),
            *("--model", f"openai/{MODEL}", "--no-show-model-warnings"),
        ],
    ),
    "qwen": (
        {
            "OPENAI_BASE_URL": URL,
            "OPENAI_API_KEY": "key",
            "OPENAI_MODEL": MODEL,
            "QWEN_CODE_SYSTEM_DEFAULTS_PATH": f"{FOLDER}/qwen.json",
            **NOBODY_ELSE,
        },
        ["--auth-type", "openai", f"--model={MODEL}"],
    ),
    "copilot": (
        {
            "COPILOT_PROVIDER_BASE_URL": URL,
            "COPILOT_PROVIDER_API_KEY": "key",
            "COPILOT_MODEL": MODEL,
            "COPILOT_PROVIDER_BEARER_TOKEN": None,
        },
        [],
    ),
    "pi": ({}, ["--extension", f"{FOLDER}/pi.js", "--model", f"rootstock/{MODEL}"]),
    "cline": ({"CLINE_PROVIDER_SETTINGS_PATH": f"{FOLDER}/cline.json"}, []),
    "crush": ({"CRUSH_GLOBAL_DATA": f"{FOLDER}/crush"}, []),
    "goose": (
        {
            "GOOSE_PROVIDER": "openai",
            "GOOSE_MODEL": MODEL,
            "OPENAI_HOST": ROOT,
            "OPENAI_BASE_PATH": "v1/chat/completions",
            "OPENAI_API_KEY": "key",
            **NOBODY_ELSE,
        },
        [],
    ),
}
"""Variables of each agent, of which None unsets one, and all its arguments."""


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_gets_its_variables_and_arguments(name: str) -> None:
    variables, arguments = GIVEN[name]
    setup = AGENTS[name].setup(TARGET)
    assert variables.items() <= setup.variables.items()
    assert list(setup.arguments) == arguments


def file_of(agent: str, name: str) -> str:
    """What `launch` writes for it, next to nothing else."""
    ((path, text),) = AGENTS[agent].setup(TARGET).files.items()
    assert path == FOLDER / name
    return text


def test_agents_without_a_setting_for_a_url_get_a_configuration() -> None:
    setup = AGENTS["opencode"].setup(TARGET)
    config = json.loads(setup.variables["OPENCODE_CONFIG_CONTENT"] or "")
    provider = config["provider"]["rootstock"]
    assert config["model"] == f"rootstock/{MODEL}"
    assert config["plugin"] == [(FOLDER / "opencode.js").as_uri()]
    assert provider["options"] == {"baseURL": URL, "apiKey": "key"}
    assert provider["models"][MODEL]["limit"] == {"context": 40_000, "output": 10_000}
    assert "withFolderAfterTools" in file_of("opencode", "opencode.js")
    before, _, extension = file_of("pi", "pi.js").partition(";\n")
    provider = json.loads(before.removeprefix("const provider = "))
    (served,) = provider["models"]
    assert (provider["baseUrl"], provider["apiKey"]) == (URL, "key")
    assert (served["id"], served["contextWindow"], served["maxTokens"]) == (MODEL, 40_000, 10_000)
    assert "withFolderAfterTools(payload, cwd)" in extension
    config = json.loads(file_of("cline", "cline.json"))
    assert config["providers"][config["lastUsedProvider"]]["settings"] == {
        "provider": "openai-compatible",
        "apiKey": "key",
        "model": MODEL,
        "baseUrl": URL,
        "contextWindow": 40_000,
    }
    config = json.loads(file_of("crush", "crush/crush.json"))
    provider, variables = config["providers"]["rootstock"], AGENTS["crush"].setup(TARGET).variables
    assert variables[provider["base_url"].removeprefix("$")] == URL
    assert variables[provider["api_key"].removeprefix("$")] == "key"
    assert [served["id"] for served in provider["models"]] == [MODEL]
    assert config["models"] == {"large": CRUSH, "small": CRUSH}
    defaults = json.loads(file_of("qwen", "qwen.json"))
    assert defaults == {"memory": {"enableManagedAutoMemory": False}}


def moved(body: object, folder: str) -> dict[str, object]:
    """The body as the extensions send it."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node")
    arguments = f"{json.dumps(body)}, {json.dumps(folder)}"
    call = f"console.log(JSON.stringify(withFolderAfterTools({arguments})))"
    script = (EXTENSIONS / "prompt_order.js").read_text() + call
    output = subprocess.run([node, "-e", script], capture_output=True, check=True, text=True).stdout
    result: dict[str, object] = json.loads(output)
    return result


def chat(system: str, question: object) -> dict[str, object]:
    return {
        "model": "m",
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": question},
            {"role": "assistant", "content": "In /a."},
            {"role": "user", "content": "Why?"},
        ],
    }


SHARED = "You are an agent.\nBe brief."
PLACE = "<env>\nFolder: /home/me/a\n</env>\nYou have skills."
REMINDER = f"<system-reminder>\n{PLACE}\n</system-reminder>\n\n"


def test_text_about_the_folder_goes_to_the_first_question() -> None:
    body = chat(f"{SHARED}\n{PLACE}", "Where?")
    assert moved(body, "/home/me/a") == chat(SHARED, f"{REMINDER}Where?")


def test_a_question_of_several_parts_gets_one_more() -> None:
    part = {"type": "text", "text": "Where?"}
    body = chat(f"{SHARED}\n\nToday's date: Friday\n{PLACE}", [part])
    dated = REMINDER.replace("<env>", "Today's date: Friday\n<env>", 1)
    assert moved(body, "/home/me/a") == chat(SHARED, [{"type": "text", "text": dated}, part])


@pytest.mark.parametrize(
    "body",
    [
        chat(SHARED, "Where?"),
        chat(PLACE, "Where?"),
        {"model": "m", "messages": [{"role": "user", "content": "In /home/me/a?"}]},
        {"model": "m", "messages": [{"role": "system", "content": f"{SHARED}\n{PLACE}"}]},
        {"model": "m", "prompt": "/home/me/a"},
    ],
)
def test_a_body_with_nothing_to_move_stays_as_it_is(body: dict[str, object]) -> None:
    assert moved(body, "/home/me/a") == body
