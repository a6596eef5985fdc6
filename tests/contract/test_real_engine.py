"""The daemon as it is: real model, real engine, real server, real client, few blocks."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from openai import APIError, AsyncOpenAI, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from engine.values.settings import EngineConfig
from server.settings import Settings
from tests.checkpoints import FAMILIES, write_family
from tests.contract.daemon import running
from tests.contract.scripted import strict_client
from tests.hosting import launched

pytestmark = pytest.mark.process

BLOCK_SIZE = 8
N_BLOCKS = 96
STREAMS = 64
STREAM_TOKENS = 24


@pytest.fixture(scope="module")
def real_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A daemon whose arena holds far less than 64 streams need at a time."""
    model = write_family(FAMILIES["qwen3"], tmp_path_factory.mktemp("models"))
    config = EngineConfig(
        model=str(model),
        kv_cache_bytes=N_BLOCKS * BLOCK_SIZE * _bytes_per_token(),
        block_size=BLOCK_SIZE,
        max_running=16,
        step_tokens=64,
    )
    engine = launched(config)
    settings = Settings(port=0, model=str(model), served_model_name=("tiny",))
    with running(engine, settings) as url:
        yield url


def _bytes_per_token() -> int:
    config = FAMILIES["qwen3"].config
    per_layer = 2 * config["num_key_value_heads"] * config["head_dim"] * 4  # K and V, float32
    return int(config["num_hidden_layers"] * per_layer)


@pytest.fixture(scope="module")
def real_client(real_url: str) -> Iterator[OpenAI]:
    with strict_client(real_url) as client:
        yield client


@pytest.fixture
def admin(real_url: str) -> Iterator[httpx.Client]:
    """A client of the admin routes, of a daemon with an empty cache."""
    with httpx.Client(base_url=real_url) as client:
        client.post("/admin/cache/clear").raise_for_status()
        yield client


def ask(text: str, **options: Any) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    return {"model": "tiny", "messages": [message], "temperature": 0, "max_tokens": 8, **options}


def test_a_resend_is_cached_but_for_one_token_and_says_the_same(
    real_client: OpenAI, admin: httpx.Client
) -> None:
    body = ask("the dog sat on the cat", extra_body={"ignore_eos": True})
    cold, warm = (real_client.chat.completions.create(**body) for _ in range(2))
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.usage.prompt_tokens_details.cached_tokens == cold.usage.prompt_tokens - 1
    assert warm.choices[0].message.content == cold.choices[0].message.content


def test_the_next_turn_of_a_conversation_finds_the_first_in_the_cache(
    real_client: OpenAI, admin: httpx.Client
) -> None:
    first_body = ask("the dog sat on the cat")
    first = real_client.chat.completions.create(**first_body)
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    follow_up = {"role": "user", "content": "and the log"}
    messages = [*first_body["messages"], answer, follow_up]
    second = real_client.chat.completions.create(**{**first_body, "messages": messages})
    # The answer's text may tokenize to other tokens than were sampled; the prompt's does not.
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 1


def test_sixteen_cold_duplicates_are_prefilled_once(real_url: str, admin: httpx.Client) -> None:
    prefix = "the cat and the dog sat on the mat and the log " * 6

    async def burst() -> list[Any]:
        async with AsyncOpenAI(base_url=f"{real_url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(
                *(client.chat.completions.create(**ask(f"{prefix}{i:02}")) for i in range(16))
            )

    answers = asyncio.run(burst())
    usages = [answer.usage for answer in answers]
    cached = sorted(usage.prompt_tokens_details.cached_tokens for usage in usages)
    assert cached[0] == 0
    assert cached[1] >= usages[0].prompt_tokens - 2 * BLOCK_SIZE


def test_many_streams_with_too_few_blocks_all_end_as_asked(
    real_url: str, admin: httpx.Client
) -> None:
    async def stream(client: AsyncOpenAI, number: int) -> tuple[str, str | None, int]:
        options = {"stream_options": {"include_usage": True}, "extra_body": {"ignore_eos": True}}
        body = ask(f"{number} sat on the mat", stream=True, max_tokens=STREAM_TOKENS, **options)
        text, reason, tokens = "", None, 0
        async for chunk in await client.chat.completions.create(**body):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
            if chunk.usage:
                tokens = chunk.usage.completion_tokens
        return text, reason, tokens

    async def all_streams(numbers: range) -> list[tuple[str, str | None, int]]:
        async with AsyncOpenAI(base_url=f"{real_url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(stream(client, number) for number in numbers))

    together = asyncio.run(all_streams(range(STREAMS)))
    assert [(reason, tokens) for _, reason, tokens in together] == [
        ("length", STREAM_TOKENS)
    ] * STREAMS
    stats = admin.get("/admin/cache/stats").json()
    assert stats["blocks_held"] == 0
    assert stats["evictions"] > 0
    assert stats["blocks_free"] + stats["blocks_cached"] == stats["blocks_total"] == N_BLOCKS


def test_a_client_that_leaves_gives_its_blocks_back(
    real_client: OpenAI, admin: httpx.Client
) -> None:
    body = ask("the log", max_tokens=400, extra_body={"ignore_eos": True})
    with real_client.chat.completions.create(stream=True, **body) as stream:
        next(iter(stream))
    check_nothing_is_held(real_client, admin)


def test_what_an_admin_ends_gives_its_blocks_back(real_client: OpenAI, admin: httpx.Client) -> None:
    body = ask("the dog", max_tokens=400, extra_body={"ignore_eos": True})
    with real_client.chat.completions.create(stream=True, **body) as stream:
        next(iter(stream))
        (live,) = admin.get("/admin/requests").json()["requests"]
        assert (live["status"], live["waits_for"]) == ("running", None)
        assert live["computed_tokens"] == live["prompt_tokens"]
        assert live["blocks"] > 0
        assert admin.post(f"/admin/requests/{live['id']}/cancel").status_code == 204
        with pytest.raises(APIError, match="An admin of this server has ended the request"):
            list(stream)
    check_nothing_is_held(real_client, admin)


def check_nothing_is_held(real_client: OpenAI, admin: httpx.Client) -> None:
    """Within a few answers: an abort ends with the step that is in flight."""
    for _ in range(50):
        real_client.chat.completions.create(**ask("the mat", max_tokens=2))
        if admin.get("/admin/cache/stats").json()["blocks_held"] == 0:
            return
    raise AssertionError("blocks are held, and nobody is left to hold them")


def test_scores_are_the_same_cold_and_warm(real_client: OpenAI, admin: httpx.Client) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": list(range(20, 45)), "max_tokens": 0}
    with httpx.Client(base_url=str(real_client.base_url)) as http:
        cold, warm = (
            http.post("completions", json={**body, "echo": True, "logprobs": 1}).json()
            for _ in range(2)
        )
    scores = [answer["choices"][0]["logprobs"]["token_logprobs"] for answer in (cold, warm)]
    assert scores[0][0] is None
    assert scores[0][1:] == pytest.approx(scores[1][1:], abs=1e-4)
    assert all(score < 0 for score in scores[0][1:])


def cached(client: OpenAI, **options: Any) -> int:
    usage = client.chat.completions.create(**ask("the dog sat on the log", **options)).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens or 0


def test_a_salt_keeps_apart_what_a_key_for_routing_does_not(
    real_client: OpenAI, admin: httpx.Client
) -> None:
    assert cached(real_client, prompt_cache_key="one") == 0
    assert cached(real_client, prompt_cache_key="two") > 0
    assert cached(real_client, extra_body={"cache_salt": "mine"}) == 0
    assert cached(real_client, extra_body={"cache_salt": "mine"}) > 0


def test_a_seed_says_the_same_again(real_client: OpenAI) -> None:
    def said(seed: int, stream: bool) -> str:
        asked = ask("the mat", temperature=1, seed=seed, max_tokens=16, stream=stream)
        answer = real_client.chat.completions.create(**asked)
        if not stream:
            return str(answer.choices[0].message.content)
        return "".join(chunk.choices[0].delta.content or "" for chunk in answer)

    assert said(1, stream=False) == said(1, stream=True)
    assert said(1, stream=False) != said(2, stream=False)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_never_in_the_text(real_client: OpenAI, stream: bool) -> None:
    """Wherever in the answer it would have been."""
    asked = ask("the cat", temperature=1, seed=3, max_tokens=24, extra_body={"ignore_eos": True})
    text = real_client.chat.completions.create(**asked).choices[0].message.content
    for start in range(4, 12):
        stop = text[start : start + 3]
        body = {**asked, "stop": [stop, "never"], "stream": stream}
        answer: Any = real_client.chat.completions.create(**body)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        news = [choice.delta if stream else choice.message for choice in choices]
        assert "".join(each.content or "" for each in news) == text[: text.index(stop)]
        assert choices[-1].finish_reason == "stop"


@pytest.mark.parametrize("seed", range(4))
def test_json_is_an_object_or_cut_by_length(real_client: OpenAI, seed: int) -> None:
    asked = ask("the cat", temperature=1, seed=seed, max_tokens=200)
    answer = real_client.chat.completions.create(**asked, response_format={"type": "json_object"})
    (choice,) = answer.choices
    content = choice.message.content
    assert content.lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(content), dict)
    else:
        assert choice.finish_reason == "length"
        assert answer.usage.completion_tokens == 200


CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Ulm"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def format_of(schema: object) -> dict[str, Any]:
    wanted = {"name": "city", "strict": True, "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": wanted}}


def test_an_answer_has_the_form_that_its_schema_gives(real_client: OpenAI) -> None:
    asked = ask("the cat", temperature=1, max_tokens=60, n=4, seed=1, **format_of(CITY))
    choices = real_client.chat.completions.create(**asked).choices
    complete = [choice for choice in choices if choice.finish_reason == "stop"]
    assert complete
    for choice in complete:
        jsonschema.validate(json.loads(choice.message.content), CITY)
    cut = real_client.chat.completions.create(**{**asked, "n": 1, "max_tokens": 3})
    assert cut.choices[0].finish_reason == "length"


@pytest.mark.parametrize("schema", [{"type": "nothing"}, {"not": {}}, {"$ref": "#/nowhere"}])
def test_a_schema_that_is_refused_harms_nobody(
    real_url: str, real_client: OpenAI, schema: object
) -> None:
    asked = ask("the cat", max_tokens=STREAM_TOKENS, extra_body={"ignore_eos": True})
    alone = real_client.chat.completions.create(**asked).choices[0].message.content
    with real_client.chat.completions.create(**asked, stream=True) as stream:
        chunks = iter(stream)
        begun = next(chunks).choices[0].delta.content or ""
        refused = httpx.post(f"{real_url}/v1/chat/completions", json=ask("x", **format_of(schema)))
        said = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format")
    assert begun + "".join(said) == alone


@pytest.mark.parametrize(
    "schema", ['{"const": "HALF"}', '{"enum": ["a", "HALF"]}', '{"properties": {"HALF": {}}}']
)
@pytest.mark.parametrize("half", [r"\ud800", r"\udfff", r"\udfff\ud800"])
def test_half_a_character_in_a_schema_as_text_is_refused(
    real_url: str, schema: str, half: str
) -> None:
    text = schema.replace("HALF", half)
    for field in ({"guided_json": text}, {"structured_outputs": {"json": text}}):
        refused = httpx.post(f"{real_url}/v1/chat/completions", json=ask("x", **field))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, one_name(field))


def one_name(field: dict[str, Any]) -> str:
    """The name under which an error reports the field."""
    ((name, value),) = field.items()
    return name if isinstance(value, str) else f"{name}.{next(iter(value))}"


def test_memory_stays_within_what_was_promised_at_load(
    real_client: OpenAI, admin: httpx.Client
) -> None:
    real_client.completions.create(model="tiny", prompt="the cat sat " * 40, max_tokens=4)
    memory = admin.get("/admin/cache/stats").json()["memory"]
    planned = memory["model"]
    kept = planned["weights_bytes"] + planned["kv_bytes"] + planned["states_bytes"]
    assert kept <= memory["active"] <= memory["peak"] <= kept + planned["workspace_bytes"]
    assert memory["cached"] <= planned["workspace_bytes"]
    assert 0 < planned["process_bytes"] <= planned["total_bytes"]


def test_all_steps_are_counted_by_the_path_of_their_decodes(
    real_client: OpenAI, admin: httpx.Client
) -> None:
    def steps() -> float:
        return sum(
            sample.value
            for family in text_string_to_metric_families(admin.get("/metrics").text)
            for sample in family.samples
            if sample.name == "rootstock_computed_steps_total"
        )

    before = steps()
    real_client.completions.create(model="tiny", prompt="the dog sat", max_tokens=20)
    assert steps() > before
    (model,) = admin.get("/admin/models").json()["models"]
    path, _, why = model["decode"].partition(": ")
    assert path in {"compiled", "eager"}
    assert why
