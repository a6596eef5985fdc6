"""What `make clients` is made of, without the clients."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from server.settings import Settings
from tests.clients.catalogue import CLIENTS, HERE, ROOT
from tests.clients.checks import Daemon, stopped
from tests.clients.prompts import Prompt, RecordingEngine
from tests.clients.scenario import (
    DEFERRED,
    ENDLESS,
    FORECAST,
    GREETING,
    PICTURE_ANSWER,
    PICTURE_QUESTION,
    QUESTION,
    READ_PICTURE,
    REASONING,
    SCRIPTED,
    SEARCH,
    UNKNOWN_FORECAST,
    WEATHER,
    WeatherStation,
    knows_the_weather,
    picture_url,
)
from tests.clients.scripted import AgentEngine
from tests.contract.daemon import running
from tests.contract.scripted import StrictClient, strict_client

pytestmark = pytest.mark.process

TOOL = {"type": "function", "function": {"name": "get_weather"}}
OUTPUT = {"type": "function", "function": {"name": "final_result"}}


@pytest.fixture(scope="module")
def client() -> Iterator[StrictClient]:
    with (
        running(AgentEngine(), Settings(port=0, served_model_name=(SCRIPTED,))) as url,
        strict_client(url) as client,
    ):
        yield client


def test_every_client_has_one_script_and_pinned_requirements() -> None:
    for name, client in CLIENTS.items():
        scripts = [f"python/{name}.py", f"node/{name}.mjs", f"programs/{name}.py"]
        assert sum((HERE / script).exists() for script in scripts) == 1, name
        text = client.requirements.read_text()
        if client.requirements.suffix == ".json":
            versions = list(json.loads(text)["dependencies"].values())
        else:
            lines = [line for line in text.splitlines() if not line.startswith("#")]
            versions = [line.partition("==")[2] for line in lines]
        assert all(re.fullmatch(r"[0-9][0-9a-z.]*", version) for version in versions), versions


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


@pytest.mark.parametrize(
    "said", ['{"sky": "rainy", "degrees": 3}', r"{\"sky\": \"rainy\", \"degrees\": 3}"]
)
def test_the_scripted_model_says_what_the_tool_said(client: StrictClient, said: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    answer = client.chat.completions.create(
        model=SCRIPTED,
        messages=[
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": said},
        ],
    )
    assert answer.choices[0].message.content == "It will be rainy, with 3 degrees."


@pytest.mark.parametrize(
    ("tool", "argument"),
    [
        ("exec_command", "cmd"),
        ("Bash", "command"),
        ("bash", "command"),
        ("run_commands", "commands"),
    ],
)
def test_the_command_of_the_scripted_model_prints_the_weather(
    client: StrictClient, tool: str, argument: str
) -> None:
    others = [{"type": "function", "function": {"name": name}} for name in ("Read", tool, "Write")]
    body = {"model": SCRIPTED, "messages": [{"role": "user", "content": QUESTION}]}
    (call,) = client.chat.completions.create(tools=others, **body).choices[0].message.tool_calls
    assert call.function.name == tool
    asked = json.loads(call.function.arguments)[argument]
    command = asked if isinstance(asked, str) else asked[0]
    assert WEATHER not in command
    assert subprocess.check_output(["bash", "-c", command], text=True).strip() == WEATHER


def test_the_scripted_model_fetches_a_deferred_tool_and_calls_it(client: StrictClient) -> None:
    search = {"type": "function", "function": {"name": "ToolSearch"}}
    deferred = {"type": "function", "function": {"name": DEFERRED}}
    messages: list[object] = [{"role": "user", "content": SEARCH}]
    called = list[str]()
    for tools in ([search], [search, deferred]):
        answer = client.chat.completions.create(model=SCRIPTED, messages=messages, tools=tools)
        message = answer.choices[0].message
        (call,) = message.tool_calls
        called.append(call.function.name)
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "Done."}]
    assert called == ["ToolSearch", DEFERRED]
    answer = client.chat.completions.create(model=SCRIPTED, messages=messages, tools=tools)
    assert not answer.choices[0].message.tool_calls


def test_the_scripted_models_prompt_begins_with_the_system_and_then_the_tools(
    client: StrictClient,
) -> None:
    def cached(system: str, question: str) -> int:
        messages = [
            {"role": "system", "content": f"{system} <tools>"},
            {"role": "user", "content": question},
        ]
        answer = client.chat.completions.create(model=SCRIPTED, messages=messages, tools=[TOOL])
        return int(answer.usage.prompt_tokens_details.cached_tokens)

    cached("In one folder.", "Why?")
    assert cached("In one folder.", "How?") > len(json.dumps(TOOL["function"]))
    assert cached("Elsewhere, in another.", "Why?") < len("<system>In")


def test_the_scripted_model_sees_a_picture(client: StrictClient) -> None:
    pytest.importorskip("PIL", reason="the packages for images are not installed")
    shown = {"type": "image_url", "image_url": {"url": picture_url()}}
    content = [{"type": "text", "text": PICTURE_QUESTION}, shown]
    messages: list[object] = [{"role": "user", "content": content}]
    answer = client.chat.completions.create(model=SCRIPTED, messages=messages)
    assert answer.choices[0].message.content == PICTURE_ANSWER


def test_the_scripted_model_reads_a_file_with_a_picture(client: StrictClient) -> None:
    pytest.importorskip("PIL", reason="the packages for images are not installed")
    read = {"type": "function", "function": {"name": "Read"}}
    path = "/home/me/picture.png"
    messages: list[object] = [{"role": "user", "content": READ_PICTURE.format(path=path)}]
    body = {"model": SCRIPTED, "messages": messages, "tools": [read, TOOL]}
    message = client.chat.completions.create(**body).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"file_path": path}
    shown = [{"type": "image_url", "image_url": {"url": picture_url()}}]
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": shown}]
    answer = client.chat.completions.create(**body)
    assert answer.choices[0].message.content == PICTURE_ANSWER


def test_the_scripted_model_edits_the_forecast(client: StrictClient) -> None:
    messages = [{"role": "user", "content": f"forecast.txt: {UNKNOWN_FORECAST}"}]
    edit = client.chat.completions.create(model=SCRIPTED, messages=messages)
    assert knows_the_weather(edit.choices[0].message.content)
    assert FORECAST in edit.choices[0].message.content


def test_an_answer_without_an_end_stops_when_its_client_leaves(client: StrictClient) -> None:
    messages = [{"role": "user", "content": ENDLESS}]
    chunks = client.chat.completions.create(model=SCRIPTED, messages=messages, stream=True)
    next(chunks)
    daemon = Daemon(str(client.base_url).removesuffix("/v1/"), SCRIPTED)
    assert stopped(daemon, chunks.close)


def test_a_check_that_fails_is_reported_and_the_others_run() -> None:
    program = (
        "from tests.clients.checks import Scripted, main, stopped\n"
        "def broken(daemon): assert daemon.root == 'there', daemon.root\n"
        "def fine(daemon): return _model(daemon)\n"
        "@Scripted\n"
        "def of_a_script(daemon): return 'it knows the answer'\n"
        "def _model(daemon): return daemon.model\n"
        "main(globals())"
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


def test_the_recorded_prompt_is_the_longest_with_the_question() -> None:
    engine = RecordingEngine()
    with running(engine, Settings(port=0, served_model_name=(SCRIPTED,))) as url:
        for system, question in (("Name it.", GREETING), ("Be brief, and kind.", "Why?")):
            messages = [
                {"role": "system", "content": system},
                {"role": "user", "content": question},
            ]
            with strict_client(url) as client:
                client.chat.completions.create(model=SCRIPTED, messages=messages, tools=[TOOL])
    assert engine.prompt.startswith("<system>Name it.\n<tools>\n")


def test_prompts_are_written_with_the_system_message_or_the_tools_first() -> None:
    prompt = Prompt("Be brief.", '{"name": "f"}\n', "<user>Why?\n")
    system_first, tools_first = prompt.system_first(), prompt.tools_first()
    assert system_first.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert tools_first.endswith("</tool_call>\n\nBe brief.<|im_end|>\n<user>Why?\n")
    assert sorted(system_first) == sorted(tools_first)
