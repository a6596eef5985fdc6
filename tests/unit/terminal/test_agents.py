"""What each agent gets, and the JavaScript that moves text about the folder after the tools."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from server.terminal.agents import AGENTS, EXTENSIONS, Target

FOLDER = Path("/state/launch/abc")
TARGET = Target("http://127.0.0.1:8000/v1", "org/m", "key", 40_000, FOLDER)

GIVEN = {
    "claude": ("ANTHROPIC_BASE_URL", [], []),
    "codex": ("OPENAI_API_KEY", ["-c"] * 7, []),
    "opencode": ("OPENCODE_CONFIG_CONTENT", [], ["opencode.js"]),
    "aider": ("AIDER_OPENAI_API_BASE", ["--set-env", "--model", "--no-show-model-warnings"], []),
    "qwen": ("QWEN_CODE_SYSTEM_DEFAULTS_PATH", ["--auth-type", "--model"], ["qwen.json"]),
    "copilot": ("COPILOT_PROVIDER_BASE_URL", [], []),
    "pi": (None, ["--extension", "--model"], ["pi.js"]),
    "cline": ("CLINE_PROVIDER_SETTINGS_PATH", [], ["cline.json"]),
    "crush": ("CRUSH_GLOBAL_DATA", [], ["crush/crush.json"]),
    "goose": ("OPENAI_HOST", [], []),
}
"""A variable, the flags, and the files in our folder, of each agent."""


def test_every_agent_has_a_row_here() -> None:
    assert list(GIVEN) == list(AGENTS)


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_gets_its_variable_flags_and_files(name: str) -> None:
    variable, flags, files = GIVEN[name]
    setup = AGENTS[name].setup(TARGET)
    assert variable is None or setup.variables[variable]
    given = [argument.partition("=")[0] for argument in setup.arguments if argument[0] == "-"]
    assert given == flags
    assert [str(path.relative_to(FOLDER)) for path in setup.files] == files


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
