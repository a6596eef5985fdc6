"""What `make clients` is made of, without the clients."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from server.settings import Settings
from tests.clients.__main__ import CLIENTS, ROOT
from tests.clients.scenario import QUESTION, REASONING, SCRIPTED, WeatherStation
from tests.clients.scripted import AgentEngine
from tests.contract.conftest import StrictClient, strict_client
from tests.contract.daemon import running

TOOL = {"type": "function", "function": {"name": "get_weather"}}
OUTPUT = {"type": "function", "function": {"name": "final_result"}}


@pytest.fixture(scope="module")
def client() -> Iterator[StrictClient]:
    with (
        running(AgentEngine(), Settings(port=0, served_model_name=(SCRIPTED,))) as url,
        strict_client(url) as client,
    ):
        yield client


@pytest.mark.parametrize("name", CLIENTS)
def test_every_client_has_a_script_and_pinned_requirements(name: str) -> None:
    here = ROOT / "tests/clients"
    lines = (here / "requirements" / f"{name}.txt").read_text().splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    assert all("==" in line and "/" not in line for line in pinned), pinned
    assert (here / f"{name}.py").exists()


def test_the_scripted_model_plays_the_scenario(client: StrictClient) -> None:
    station = WeatherStation()
    messages: list[object] = [{"role": "user", "content": QUESTION}]
    body = {"model": SCRIPTED, "messages": messages}
    asked = client.chat.completions.create(tools=[TOOL], **body).choices[0].message
    (call,) = asked.tool_calls
    assert asked.reasoning_content == REASONING
    result = station.get_weather(**json.loads(call.function.arguments))
    messages += [asked, {"role": "tool", "tool_call_id": call.id, "content": result}]
    answer = client.chat.completions.create(tools=[TOOL], **body)
    station.check(answer.choices[0].message.content)
    output = client.chat.completions.create(tools=[TOOL, OUTPUT], **body).choices[0].message
    assert [call.function.name for call in output.tool_calls] == ["final_result"]


def test_a_check_that_fails_is_reported_and_the_others_run() -> None:
    program = (
        "from tests.clients.checks import main\n"
        "def fine(daemon): return daemon.model\n"
        "def broken(daemon): assert daemon.base_url == 'there', daemon.base_url\n"
        "main(broken, fine, scripted=[fine])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "here", "demo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"check": "broken", "passed": False, "detail": "AssertionError: here"},
        {"check": "fine", "passed": True, "detail": "demo"},
    ]
    assert done.returncode == 1
