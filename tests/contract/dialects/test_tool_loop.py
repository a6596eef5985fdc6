"""An agent's loop in each dialect: each request repeats the conversation, and only its new
tokens are computed.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.values.settings import EngineConfig
from server.settings import Settings
from tests.answering import QWEN3
from tests.checkpoints import SHALLOW, write_family
from tests.contract.daemon import running
from tests.contract.scripted import AnthropicClient, StrictClient, anthropic_client, strict_client
from tests.hosting import loaded

pytestmark = pytest.mark.process

MARK = {"cache_control": {"type": "ephemeral"}}
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look somewhere.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"enum": ["here", "there", "é <b>"]},
                "depth": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["place", "depth"],
        },
    },
}


@pytest.fixture(scope="module")
def qwen3_shaped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose template begins the reasoning, and keeps it only where it is new."""
    family = replace(SHALLOW, config={**SHALLOW.config, "max_position_embeddings": 4096})
    directory = write_family(family, tmp_path_factory.mktemp("models"))
    file = directory / "tokenizer_config.json"
    text = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps({**text, "chat_template": QWEN3}), "utf-8")
    return directory


@pytest.fixture(scope="module", params=["demo", "reasoning"])
def url(request: pytest.FixtureRequest, qwen3_shaped: Path, demo_url: str) -> Iterator[str]:
    if request.param == "demo":
        yield demo_url
        return
    engine = loaded(EngineConfig(str(qwen3_shaped), kv_cache_bytes=32 << 20))
    with running(engine, Settings(port=0, served_model_name=(request.param,))) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[StrictClient]:
    with strict_client(url) as client:
        yield client


@pytest.fixture(scope="module")
def messages_client(url: str) -> Iterator[AnthropicClient]:
    with anthropic_client(url) as client:
        yield client


def options(client: StrictClient) -> dict[str, Any]:
    """What makes this model call a tool in few words."""
    model = client.models.list().data[0].id
    options = {"model": model, "tools": [LOOK], "tool_choice": "required", "max_tokens": 200}
    options |= {"temperature": 1, "parallel_tool_calls": False}
    if model == "reasoning":
        options["extra_body"] = {
            "thinking_budget": 6,
            "chat_template_kwargs": {"opens": True, "enable_thinking": True},
        }
    return options


class Loop(ABC):
    """An agent of one dialect, whose model calls a tool in each step."""

    @abstractmethod
    def step(self, number: int) -> tuple[int, int]:
        """Send what is new; the tokens that were cached, and those of prompt and answer."""


class ChatLoop(Loop):
    def __init__(self, client: StrictClient) -> None:
        self._client = client
        self._asked = options(client)
        self._messages: list[Any] = [{"role": "user", "content": "Look everywhere."}]

    def step(self, number: int) -> tuple[int, int]:
        create = self._client.chat.completions.create
        completion = create(messages=self._messages, seed=number, **self._asked)
        usage, (choice,) = completion.usage, completion.choices
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert set(json.loads(call.function.arguments)) == {"place", "depth"}
        result = {"role": "tool", "tool_call_id": call.id, "content": f"nothing, {number}"}
        self._messages += [choice.message.model_dump(exclude_none=True), result]
        return usage.prompt_tokens_details.cached_tokens, usage.total_tokens


class MessagesLoop(Loop):
    """Its blocks come back as they were sent, and the mark moves on as Claude Code moves it."""

    def __init__(self, client: AnthropicClient, *, stream: bool) -> None:
        self._client, self._stream = client, stream
        function = LOOK["function"]
        self._asked = {
            "model": client.models.list().data[0].id,
            "tools": [{"name": function["name"], "input_schema": function["parameters"]}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "max_tokens": 200,
            "extra_body": {"temperature": 1},
        }
        self._reasons = self._asked["model"] == "reasoning"
        if self._reasons:
            self._asked["thinking"] = {"type": "enabled", "budget_tokens": 6}
            self._asked["extra_body"] |= {"chat_template_kwargs": {"opens": True}}
        self._messages: list[Any] = []
        self._new: dict[str, Any] = {"type": "text", "text": f"Look everywhere, {stream}."}

    def step(self, number: int) -> tuple[int, int]:
        marked = {"role": "user", "content": [self._new | MARK]}
        answer = self._answer(messages=[*self._messages, marked], **self._asked)
        usage = answer.usage
        assert (answer.stop_reason, usage.input_tokens) == ("tool_use", 0)
        *thinking, call = (block for block in answer.content if block.type != "text")
        assert [block.type for block in thinking] == ["thinking"] * self._reasons
        assert set(call.input) == {"place", "depth"}
        self._messages.append({"role": "user", "content": [self._new]})
        self._messages.append({"role": "assistant", "content": answer.model_dump()["content"]})
        content = f"nothing, {number}"
        self._new = {"type": "tool_result", "tool_use_id": call.id, "content": content}
        prompt_tokens = usage.cache_creation_input_tokens + usage.cache_read_input_tokens
        return usage.cache_read_input_tokens, prompt_tokens + usage.output_tokens

    def _answer(self, **asked: Any) -> Any:
        if not self._stream:
            return self._client.messages.create(**asked)
        with self._client.messages.stream(**asked) as stream:
            return stream.get_final_message()


class ResponsesLoop(Loop):
    """The server has what was said, or the client carries it and the server stores nothing."""

    def __init__(
        self, client: StrictClient, tool: dict[str, Any], *, carries: bool, summary: bool = False
    ) -> None:
        self._client, self._carries = client, carries
        self._asked = options(client) | {"tools": [tool], "extra_body": {}}
        self._asked["max_output_tokens"] = self._asked.pop("max_tokens")
        self._asked["extra_body"] = options(client).get("extra_body", {})
        if tool["type"] == "custom":  # whose text would go on for long
            base_url = str(client.base_url).removesuffix("/v1/")
            tokens = httpx.post(f"{base_url}/tokenize", json={"prompt": '"'}).json()["tokens"]
            self._asked["extra_body"] |= {"logit_bias": {str(token): 15 for token in tokens}}
        if summary:
            self._asked["reasoning"] = {"summary": "auto"}
        if carries:
            self._asked |= {"store": False, "include": ["reasoning.encrypted_content"]}
        first = f"Look: {tool['name']}, {carries}."
        self._items: list[Any] = [{"role": "user", "content": first}]
        self._previous: str | None = None

    def step(self, number: int) -> tuple[int, int]:
        asked = self._asked | {"input": self._items, "previous_response_id": self._previous}
        asked["extra_body"] = {**asked["extra_body"], "seed": number}
        response = self._client.responses.create(**asked)
        assert response.status == "completed"
        call = response.output[-1]
        if call.type == "function_call":
            assert set(json.loads(call.arguments)) == {"place", "depth"}
        output = {"call_id": call.call_id, "output": f"nothing, {number}"}
        news = [{"type": f"{call.type}_output", **output}]
        if self._carries:
            self._items += [item.model_dump(exclude_none=True) for item in response.output]
            self._items += news
        else:
            self._items, self._previous = news, response.id
        return response.usage.input_tokens_details.cached_tokens, response.usage.total_tokens


LOOK_TOOL = {"type": "function", "strict": False, **LOOK["function"]}
NOTE_TOOL = {"type": "custom", "name": "note", "description": "Note something down."}
SPIED = {"type": "namespace", "name": "spies", "description": "Spies.", "tools": [LOOK_TOOL]}
LOOPS: dict[str, Callable[[StrictClient, AnthropicClient], Loop]] = {
    "chat": lambda openai, anthropic: ChatLoop(openai),
    "messages": lambda openai, anthropic: MessagesLoop(anthropic, stream=False),
    "messages streamed": lambda openai, anthropic: MessagesLoop(anthropic, stream=True),
    "responses by id": lambda openai, anthropic: ResponsesLoop(openai, LOOK_TOOL, carries=False),
    "responses carried": lambda openai, anthropic: ResponsesLoop(openai, LOOK_TOOL, carries=True),
    "responses, a namespace and a summary": lambda openai, anthropic: ResponsesLoop(
        openai, SPIED, carries=True, summary=True
    ),
    "responses, a custom tool": lambda openai, anthropic: ResponsesLoop(
        openai, NOTE_TOOL, carries=True
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param("chat", marks=pytest.mark.slow), *sorted(LOOPS.keys() - {"chat"})]
)
def test_each_step_adopts_all_of_the_one_before_but_its_last_token(
    client: StrictClient, messages_client: AnthropicClient, name: str
) -> None:
    loop, expected = LOOPS[name](client, messages_client), 0
    for step in range(10 if name == "chat" else 4):
        cached_tokens, n_tokens = loop.step(step)
        assert cached_tokens >= expected, f"step {step}"
        expected = n_tokens - 1


def test_a_render_is_what_each_step_computes(client: StrictClient) -> None:
    """With tools, reasoning and replayed answers: the cache knows nothing but what was computed."""
    messages: list[Any] = [{"role": "user", "content": "Look everywhere."}]
    with httpx.Client(base_url=str(client.base_url).removesuffix("/v1/")) as http:
        for step in range(3):
            asked = {"messages": messages, **options(client)}
            asked |= asked.pop("extra_body", {})
            rendered = http.post("/v1/chat/completions/render", json=asked).json()["token_ids"]
            tokenized = http.post("/tokenize", json=asked).json()["tokens"]
            http.post("/admin/cache/clear").raise_for_status()
            answer = http.post("/v1/chat/completions", json={**asked, "seed": step}).json()
            assert answer["usage"]["prompt_tokens"] == len(rendered)
            probe = {"prompt": [*rendered, 0]}  # of a whole prompt the last token is never found
            probed = http.post("/admin/cache/probe", json=probe).json()
            assert probed["cached_tokens"] == len(rendered)
            assert tokenized == rendered
            (call,) = answer["choices"][0]["message"]["tool_calls"]
            result = {"role": "tool", "tool_call_id": call["id"], "content": f"nothing, {step}"}
            messages += [answer["choices"][0]["message"], result]


def test_a_line_break_behind_the_reasoning_is_no_part_of_the_answer(
    url: str, client: StrictClient
) -> None:
    """It may come, since models write it there, and whoever has a grammar does not see it."""
    (line,) = httpx.post(f"{url}/tokenize", json={"prompt": "\n"}).json()["tokens"]
    extra = {**options(client).get("extra_body", {}), "guided_regex": "ab"}
    completion = client.chat.completions.create(
        model="",
        messages=[{"role": "user", "content": "Look everywhere."}],
        max_tokens=50,
        logit_bias={str(line): 100},
        logprobs=True,
        extra_body=extra,
    )
    (choice,) = completion.choices
    assert (choice.message.content, choice.finish_reason) == ("ab", "stop")
    said = "".join(token.token for token in choice.logprobs.content)
    assert said.endswith("</think>\nab" if "thinking_budget" in extra else "ab")


def test_of_two_tools_the_allowed_one_is_called(client: StrictClient) -> None:
    touch = {"type": "function", "function": {"name": "touch"}}
    chosen = {"mode": "required", "tools": [touch]}
    asked = options(client) | {"tools": [LOOK, touch]}
    asked["tool_choice"] = {"type": "allowed_tools", "allowed_tools": chosen}
    messages = [{"role": "user", "content": "Look everywhere."}]
    for seed in range(3):
        completion = client.chat.completions.create(messages=messages, seed=seed, **asked)
        (call,) = completion.choices[0].message.tool_calls
        assert call.function.name == "touch", f"seed {seed}"


def test_reasoning_is_counted_and_ends_within_its_budget(client: StrictClient) -> None:
    asked = options(client)
    messages = [{"role": "user", "content": "Look."}]
    completion = client.chat.completions.create(messages=messages, seed=1, **asked)
    tokens = completion.usage.completion_tokens_details.reasoning_tokens
    reasons = asked["model"] == "reasoning"
    assert 0 < tokens <= 6 + len("</think>") if reasons else tokens == 0
    reasoning = (completion.choices[0].message.model_extra or {}).get("reasoning_content")
    assert bool(reasoning) == reasons


def test_a_history_that_was_edited_is_taken_as_it_is(client: StrictClient) -> None:
    messages: list[Any] = [{"role": "user", "content": "Look once."}]
    completion = client.chat.completions.create(messages=messages, **options(client))
    (call,) = completion.choices[0].message.tool_calls
    answer = completion.choices[0].message.model_dump(exclude_none=True)
    answer["tool_calls"][0]["function"]["arguments"] = '{"place": "nowhere", "depth": 1}'
    messages += [answer, {"role": "tool", "tool_call_id": call.id, "content": "nothing"}]
    again = client.chat.completions.create(messages=messages, **options(client))
    adopted = again.usage.prompt_tokens_details.cached_tokens
    assert adopted < completion.usage.prompt_tokens + completion.usage.completion_tokens - 1
