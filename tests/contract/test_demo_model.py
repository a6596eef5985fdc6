"""What a newcomer meets: the daemon on its embedded model, asked by the openai client."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from engine.launch import launch
from engine.types import EngineConfig
from server.metrics import EngineTelemetry
from server.settings import Settings
from tests.contract.conftest import strict_client
from tests.contract.daemon import running
from tools.demo_model.tasks.knowledge import FACTS

QUESTIONS = {
    "What is Rootstock?": FACTS["what"]["answer"],
    "Who are you?": FACTS["self"]["answer"],
    "How does the cache work?": FACTS["cache"]["answer"],
    "How do I clear the cache?": FACTS["clear"]["answer"],
    "How do I serve a real model?": FACTS["real_model"]["answer"],
    "Repeat: Laura painted 42 wooden boats in Lisbon.": "Laura painted 42 wooden boats in Lisbon.",
}


@pytest.fixture(scope="module")
def demo_url() -> Iterator[str]:
    telemetry = EngineTelemetry()
    engine = launch(EngineConfig(model="", kv_cache_bytes=16 << 20), telemetry, lambda line: None)
    with running(engine, Settings(port=0), telemetry) as url:
        yield url


@pytest.fixture(scope="module")
def demo(demo_url: str) -> Iterator[OpenAI]:
    with strict_client(demo_url) as client:
        yield client


def ask(*texts: str, **options: Any) -> dict[str, Any]:
    """The body of a chat of these turns, the user's first."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"model": "rootstock-demo", "messages": messages, "temperature": 0, **options}


def test_it_is_listed_by_its_name(demo: OpenAI) -> None:
    assert [model.id for model in demo.models.list()] == ["rootstock-demo"]


@pytest.mark.parametrize("question", QUESTIONS)
def test_it_answers_and_stops(demo: OpenAI, question: str) -> None:
    choice = demo.chat.completions.create(**ask(question)).choices[0]
    assert choice.message.content == QUESTIONS[question]
    assert choice.finish_reason == "stop"


def test_it_answers_at_the_temperature_that_clients_leave_unsaid(demo: OpenAI) -> None:
    body = {**ask("What is Rootstock?", seed=1), "temperature": None}
    answer = demo.chat.completions.create(**body).choices[0].message.content
    assert answer == QUESTIONS["What is Rootstock?"]


def test_a_stream_says_what_a_whole_answer_says(demo: OpenAI) -> None:
    with demo.chat.completions.create(stream=True, **ask("What is Rootstock?")) as stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == QUESTIONS["What is Rootstock?"]


def test_a_second_turn_refers_to_the_first_and_finds_it_in_the_cache(demo: OpenAI) -> None:
    told = "My name is Teodora."
    first = demo.chat.completions.create(**ask(told))
    answer = first.choices[0].message.content
    second = demo.chat.completions.create(**ask(told, answer, "What is my name?"))
    assert second.choices[0].message.content == "Your name is Teodora."
    spoken = first.usage.prompt_tokens + first.usage.completion_tokens
    # All but the end-of-turn token, which was sampled and not computed.
    assert second.usage.prompt_tokens_details.cached_tokens >= spoken - 1


def test_what_others_ask_at_the_same_time_changes_no_answer(demo_url: str) -> None:
    async def together() -> list[str]:
        async with AsyncOpenAI(base_url=f"{demo_url}/v1", api_key="none") as client:
            answers = await asyncio.gather(
                *(client.chat.completions.create(**ask(text)) for text in [*QUESTIONS] * 4)
            )
        return [answer.choices[0].message.content for answer in answers]

    assert asyncio.run(together()) == [*QUESTIONS.values()] * 4
