"""Answers as models have written them, letter by letter, through the real engine, grammars and
dialects: what four kinds of clients get of each, whole and streamed.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.values.settings import EngineConfig
from server.settings import Settings
from tests.contract.daemon import running
from tests.hosting import loaded
from tests.scripted_checkpoint import write_scripted

pytestmark = pytest.mark.process

Fields = dict[str, Any]

D = {"type": "object", "properties": {"number": {"type": "number"}}, "required": ["number"]}
REFERENCE = {"$defs": {"A": D}, "$ref": "#/$defs/A"}
ALL_OF = {"allOf": [D, {"type": "object", "properties": {"x": {"type": "string"}}}]}
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@dataclass(frozen=True)
class Row:
    """What a model writes to a request, and the answer. `calls` are names and arguments."""

    text: str
    content: str = ""
    reasoning: str = ""
    calls: Sequence[tuple[str, Fields]] = ()
    tools: Mapping[str, Fields] = field(default_factory=dict)
    stop: Sequence[str] = ()
    parsed: Fields | None = None  # an answer that has to be JSON


@dataclass(frozen=True)
class Model:
    """A checkpoint of some rows, and how its answers are read."""

    rows: Sequence[Row]
    tool_parser: str = "none"
    reasoning_parser: str = "none"
    opened: str = ""
    added: Sequence[str] = ()
    special: Sequence[str] = ()
    tool_guides: str = "all"


THINK = ("<think>", "</think>")
TOOL_CALL = ("<tool_call>", "</tool_call>")
QWEN = "<tool_call>\n<function=g>\n<parameter=number>\n42\n</parameter>\n</function>\n</tool_call>"
QUESTION = (
    "First I restate it. Question: what is 2+2? That is four.</think>\n\n"
    "The answer is 4. Question: is it even?"
)
MODELS = {
    "qwen3_coder": Model(
        [
            Row(QWEN, calls=[("g", {"number": 42})], tools={"g": REFERENCE}),
            Row(QWEN, calls=[("g", {"number": 42})], tools={"g": ALL_OF}),
            Row(
                QWEN.replace("number", "city").replace("=g>", "=get_weather>"),
                calls=[("get_weather", {"city": "42"})],
                tools={"get_weather": WEATHER},
                stop=["\n", "42", "par"],
            ),
            Row(
                f"Let me see.\n\n{QWEN}",
                "Let me see.",
                calls=[("g", {"number": 42})],
                tools={"g": D},
                stop=["\n\n"],
            ),
        ],
        "qwen3_coder",
        added=TOOL_CALL,
    ),
    "llama3_json": Model(
        [
            Row(
                '{"name": "Alice", "age": 30}',
                '{"name": "Alice", "age": 30}',
                tools={"get_weather": WEATHER},
            ),
            Row(
                '{"name": "get_weather", "parameters": {"city": "Oslo"}}',
                calls=[("get_weather", {"city": "Oslo"})],
                tools={"get_weather": WEATHER},
            ),
        ],
        "llama3_json",
    ),
    "thinking": Model(
        [
            Row(
                QUESTION,
                "The answer is 4. ",
                "First I restate it. Question: what is 2+2? That is four.",
                stop=["Question:"],
            ),
            Row("Hm.\n\nSo.</think>\n\nYes.\n\nNo.", "Yes.", "Hm.\n\nSo.", stop=["\n\n"]),
            Row("<think>Hm.</think>So.", "So.", "Hm."),
            Row("Hm.</think>So.<|endoftext|>No.", "So.", "Hm.", stop=["<|endoftext|>"]),
        ],
        reasoning_parser="deepseek_r1",
        opened="<think>\n",
        added=THINK,
    ),
    "not thinking": Model(
        [Row("</think>\n\nHello there.", "Hello there.")],
        reasoning_parser="deepseek_r1",
        opened="<think>\n\n</think>\n\n",
        added=THINK,
    ),
    "thinking behind text": Model(
        [Row("First this, then that.</think>\n\nFour.", "Four.", "First this, then that.")],
        reasoning_parser="deepseek_r1",
        opened="<think>\nHere are my reasoning steps:\n",
        added=THINK,
    ),
    "hermes without guides": Model(
        [
            Row(
                '<tool_call>\n{"name": "f", "arguments": {"a": "x\ty"}}}\n</tool_call>',
                calls=[("f", {"a": "x\ty"})],
                tools={"f": {}},
            ),
            Row(
                '<tool_call>\n{"name": "f", "arguments": {"a": [1}</tool_call>',
                calls=[("f", {"a": [1]})],
                tools={"f": {}},
            ),
        ],
        "hermes",
        added=TOOL_CALL,
        tool_guides="strict-only",
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Model, httpx.Client]]:
    model = MODELS[request.param]
    path: Path = tmp_path_factory.mktemp("models") / "scripted"
    write_scripted(
        path,
        [row.text for row in model.rows],
        opened=model.opened,
        added=model.added,
        special=model.special,
    )
    engine = loaded(
        EngineConfig(model=str(path), kv_cache_bytes=16 << 20, block_size=16, max_running=4)
    )
    settings = Settings(
        port=0,
        model=str(path),
        served_model_name=("m",),
        tool_parser=model.tool_parser,
        reasoning_parser=model.reasoning_parser,
        tool_guides=model.tool_guides,
    )
    with running(engine, settings) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield model, client


@dataclass
class Said:
    """What a client has got."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[Any]] = field(default_factory=list)  # name and JSON text, or its value


def events(response: httpx.Response) -> Iterator[Fields]:
    """The data of a stream of events, or its lines."""
    assert response.status_code == 200, response.text
    for line in response.text.splitlines():
        data = line.removeprefix("data: ")
        if data.startswith("{"):
            yield json.loads(data)


def chat(client: httpx.Client, number: int, row: Row, *, stream: bool) -> Said:
    functions = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in row.tools.items()
    ]
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": str(number)}],
        "temperature": 0,
        "stream": stream,
        **({"tools": functions} if functions else {}),
        **({"stop": row.stop} if row.stop else {}),
    }
    response, said = client.post("/v1/chat/completions", json=body), Said()
    for event in events(response):
        delta = event["choices"][0].get("delta") or event["choices"][0].get("message") or {}
        said.content += delta.get("content") or ""
        said.reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or ():
            if call["function"].get("name"):
                said.calls.append([call["function"]["name"], ""])
            said.calls[-1][1] += call["function"].get("arguments", "")
    return said


def messages(client: httpx.Client, number: int, row: Row, *, stream: bool) -> Said:
    tools = [{"name": name, "input_schema": schema} for name, schema in row.tools.items()]
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": str(number)}],
        "max_tokens": 400,
        "temperature": 0,
        "stream": stream,
        **({"tools": tools} if tools else {}),
        **({"stop_sequences": row.stop} if row.stop else {}),
    }
    response, said = client.post("/v1/messages", json=body), Said()
    for event in events(response):
        blocks = [event["content_block"]] if "content_block" in event else event.get("content", ())
        for block in blocks:
            said.content += block.get("text", "")
            said.reasoning += block.get("thinking", "")
            if block["type"] == "tool_use":
                given = "" if stream else json.dumps(block["input"])
                said.calls.append([block["name"], given])
        delta = event.get("delta", {})
        said.content += delta.get("text", "")
        said.reasoning += delta.get("thinking", "")
        if "partial_json" in delta:
            said.calls[-1][1] += delta["partial_json"]
    return said


def ollama(client: httpx.Client, number: int, row: Row, *, stream: bool) -> Said:
    tools = [
        {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}
        for name, schema in row.tools.items()
    ]
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": str(number)}],
        "options": {"temperature": 0, **({"stop": row.stop} if row.stop else {})},
        "stream": stream,
        **({"tools": tools} if tools else {}),
    }
    response, said = client.post("/api/chat", json=body), Said()
    for event in events(response):
        message = event["message"]
        said.content += message["content"]
        said.reasoning += message.get("thinking", "")
        for call in message.get("tool_calls", ()):
            function = call["function"]
            said.calls.append([function["name"], json.dumps(function["arguments"])])
    return said


def responses(client: httpx.Client, number: int, row: Row, *, stream: bool) -> Said:
    tools = [
        {"type": "function", "name": name, "parameters": schema, "strict": False}
        for name, schema in row.tools.items()
    ]
    body = {
        "model": "m",
        "input": str(number),
        "temperature": 0,
        "stream": stream,
        **({"tools": tools} if tools else {}),
    }
    said, answer = Said(), Fields()
    for event in events(client.post("/v1/responses", json=body)):
        answer = event.get("response", event)
        if event.get("type") == "response.output_text.delta":
            said.content += event["delta"]
        if event.get("type") == "response.reasoning_text.delta":
            said.reasoning += event["delta"]
    for item in answer["output"]:
        texts = "".join(part["text"] for part in item.get("content") or ())
        if item["type"] == "function_call":
            said.calls.append([item["name"], item["arguments"]])
        elif not stream:
            said.content += texts if item["type"] == "message" else ""
            said.reasoning += texts if item["type"] == "reasoning" else ""
    return said


DIALECTS = [chat, messages, ollama, responses]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.__name__)
def test_what_was_written_means_the_same_to_every_client(
    served: tuple[Model, httpx.Client], dialect: Any, stream: bool
) -> None:
    model, client = served
    for number, row in enumerate(model.rows):
        if row.stop and dialect is responses:
            continue  # which has no stop strings
        said = dialect(client, number, row, stream=stream)
        calls = [(name, json.loads(arguments)) for name, arguments in said.calls]
        assert (said.content, said.reasoning, calls) == (
            row.content,
            row.reasoning,
            list(row.calls),
        ), row.text
