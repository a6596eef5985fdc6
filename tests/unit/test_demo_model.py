"""What the demonstration model is trained on and scored by; no training happens here."""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random

import mlx.core as mx
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from tools.demo_model.conversation import Task
from tools.demo_model.curriculum import (
    ALL,
    COPYING,
    FROM_NOTHING,
    FROM_WEIGHTS,
    Conversation,
    Stages,
    conversations,
)
from tools.demo_model.forward import hidden_states
from tools.demo_model.publish import read_weights, write_checkpoint
from tools.demo_model.score import Question, held_out, is_right
from tools.demo_model.tasks.knowledge import FACTS
from tools.demo_model.tasks.pick import LookUp, Pick
from tools.demo_model.tasks.recall import Recall
from tools.demo_model.tasks.repeat import Repeat
from tools.demo_model.tasks.tool_use import (
    AnyNames,
    AnyValues,
    NoTools,
    ParallelCalls,
    ToolAnswer,
    ToolCall,
    ToolSteps,
    ToolsUnused,
)
from tools.demo_model.tasks.unknown import I_DO_NOT_KNOW, UNKNOWN, Unknown
from tools.demo_model.tokens import sample, train_tokenizer
from tools.demo_model.train import CONFIG, Batch, Rates, Trainer, batch, batches
from tools.demo_model.words import Words, split_words

LEARNED, HELD_OUT = split_words()
SMALL = {**CONFIG, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
RATES = Rates(steps=100, muon=0.02, adam=2e-3, warmup_steps=60, decay_share=0.3)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(LEARNED, seed=0, n_samples=1000)


def some(count: int) -> list[Conversation]:
    return list(islice(conversations(ALL, LEARNED, Random(5)), count))


def words_of(words: Words) -> set[str]:
    return {word.lower() for listed in words.lists.values() for word in listed}


def test_no_word_and_no_way_to_ask_is_on_both_sides() -> None:
    assert words_of(HELD_OUT)
    assert not words_of(LEARNED) & words_of(HELD_OUT)
    asked = {question for fact in FACTS.values() for question in fact["ask"]}
    kept = {question for fact in FACTS.values() for question in fact["held_out"]}
    assert len(kept) >= 2 * len(FACTS)
    assert not asked & kept


def test_what_is_unknown_is_split_too_and_no_fact_answers_it() -> None:
    groups = ("general", "rootstock", "untold", "products", "features", "languages", "code")
    for group in groups:
        assert UNKNOWN[group]["held_out"]
        assert not set(UNKNOWN[group]["ask"]) & set(UNKNOWN[group]["held_out"])
    answered = {q for fact in FACTS.values() for q in [*fact["ask"], *fact["held_out"]]}
    for task in (Unknown("ask"), Unknown("held_out")):
        for seed in range(2000):
            question, answer = task.exchange(LEARNED, Random(seed)).messages
            assert question["content"] not in answered
            assert answer["content"] == I_DO_NOT_KNOW


TASKS: tuple[Task, ...] = (
    *(Repeat(), Pick(), LookUp(), Recall(), ToolAnswer(), ToolSteps(), NoTools()),
    *(ToolCall(), AnyNames(ToolCall()), AnyValues(ToolCall())),
    *(ParallelCalls(), AnyNames(ParallelCalls())),
    *(Unknown("held_out"), ToolsUnused((Unknown("held_out"), Repeat()))),
)


def test_held_out_prompts_exist_for_every_task() -> None:
    """A tenth of each list is enough for whatever a task draws."""
    for task in TASKS:
        for seed in range(200):
            task.exchange(HELD_OUT, Random(seed))


def test_the_same_seed_makes_the_same_conversations() -> None:
    assert some(20) == some(20)


def test_what_the_assistant_says_is_marked(tokenizer: PreTrainedTokenizerFast) -> None:
    for conversation in some(50):
        encoded = sample(tokenizer, conversation)
        said = tokenizer.decode([encoded.ids[index] for index in encoded.said])
        expected = [m for m in conversation.messages if m["role"] == "assistant"]
        turns = said.split("<|im_end|>")[:-1]
        assert len(turns) == len(expected)
        for turn, message in zip(turns, expected, strict=True):
            assert turn.startswith(message["content"])


def test_a_call_is_rendered_as_it_is_parsed(tokenizer: PreTrainedTokenizerFast) -> None:
    exchange = ToolCall().exchange(LEARNED, Random(3))
    function = exchange.messages[-1]["tool_calls"][0]["function"]
    encoded = sample(tokenizer, Conversation(exchange.messages, exchange.tools))
    text = tokenizer.decode([encoded.ids[index] for index in encoded.said])
    call = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call><|im_end|>"))
    assert call == {"name": function["name"], "arguments": json.loads(function["arguments"])}


def test_two_calls_stand_one_below_the_other(tokenizer: PreTrainedTokenizerFast) -> None:
    exchange = next(
        one
        for seed in range(100)
        if "tool_calls" in (one := ParallelCalls().exchange(LEARNED, Random(seed))).messages[-1]
    )
    encoded = sample(tokenizer, Conversation(exchange.messages, exchange.tools))
    text = tokenizer.decode([encoded.ids[index] for index in encoded.said])
    calls = text.removesuffix("<|im_end|>").split("\n</tool_call>\n<tool_call>\n")
    assert len(calls) == 2
    asked = Question("parallel calls", (), (), exchange.messages[-1])
    assert is_right(asked, text.removesuffix("<|im_end|>"))
    assert not is_right(asked, f"{calls[0]}\n</tool_call>")


def test_steps_ask_for_what_the_last_result_named_and_without_tools_nothing_is_called() -> None:
    for seed in range(50):
        exchange = ToolSteps().exchange(LEARNED, Random(seed))
        results = [json.loads(m["content"]) for m in exchange.messages if m["role"] == "tool"]
        called = [
            json.loads(m["tool_calls"][0]["function"]["arguments"])
            for m in exchange.messages
            if "tool_calls" in m
        ]
        named = [result["next"] for result in results if "next" in result]
        assert [value for arguments in called[1:] for value in arguments.values()] == named
        alone = NoTools().exchange(LEARNED, Random(seed))
        assert not alone.tools
        assert alone.messages[-1]["content"] == I_DO_NOT_KNOW


def test_a_word_is_the_same_tokens_wherever_it_stands(tokenizer: PreTrainedTokenizerFast) -> None:
    def encode(text: str) -> Sequence[int]:
        ids: list[int] = tokenizer.encode(text)
        return ids

    word = encode("lighthouse")
    for text in (" lighthouse", '"lighthouse"', "\nlighthouse.", "the lighthouse, and"):
        ids = list(encode(text))
        assert any(ids[i : i + len(word)] == list(word) for i in range(len(ids)))


@pytest.mark.slow
@pytest.mark.parametrize("stages", [FROM_NOTHING, FROM_WEIGHTS])
def test_batches_continue_where_they_stopped(
    tokenizer: PreTrainedTokenizerFast, stages: Stages
) -> None:
    def ids(first: int, count: int) -> list[list[list[int]]]:
        taken = islice(batches(tokenizer, LEARNED, stages, 1, first), count)
        return [[half.ids.tolist() for half in halves] for halves in taken]  # type: ignore[misc]

    assert ids(0, 4)[2:] == ids(2, 2)


def test_targets_are_the_tokens_that_follow(tokenizer: PreTrainedTokenizerFast) -> None:
    [halves] = islice(batches(tokenizer, LEARNED, FROM_NOTHING, 1, 0), 1)
    for half in halves:
        flat = half.ids.reshape(-1)
        assert flat[half.said + 1].tolist() == half.targets.tolist()


@pytest.fixture
def on_cpu() -> Iterator[None]:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


def small_batch(tokenizer: PreTrainedTokenizerFast, seed: int) -> Batch:
    drawn = islice(conversations(COPYING, LEARNED, Random(seed)), 4)
    return batch([sample(tokenizer, one) for one in drawn])


def test_the_trainers_forward_is_that_of_mlx_lm(
    tokenizer: PreTrainedTokenizerFast, on_cpu: None
) -> None:
    model = Trainer(RATES, seed=3, config=SMALL).model
    ids = small_batch(tokenizer, seed=1).ids
    found, expected = hidden_states(model, ids), model.model(ids)
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=1e-4)


@pytest.mark.slow
def test_training_learns_and_goes_on_from_where_it_was_saved(
    tokenizer: PreTrainedTokenizerFast, on_cpu: None, tmp_path: Path
) -> None:
    halves = [small_batch(tokenizer, seed) for seed in (1, 2)]
    trainer = Trainer(RATES, seed=0, config=SMALL)
    losses = [trainer.learn(halves) for _ in range(4)]
    assert losses[-1] < losses[0]
    trainer.save(tmp_path / "state.safetensors")
    resumed = Trainer(RATES, seed=7, config=SMALL)
    resumed.resume(tmp_path / "state.safetensors")
    assert resumed.step == 4
    for _ in range(2):
        assert resumed.learn(halves) == pytest.approx(trainer.learn(halves), rel=1e-5)


def test_training_begins_with_the_weights_that_were_published(
    tokenizer: PreTrainedTokenizerFast, on_cpu: None, tmp_path: Path
) -> None:
    published = Trainer(RATES, seed=1, config=SMALL)
    write_checkpoint(tmp_path, published.model, tokenizer)
    trainer = Trainer(RATES, seed=2, config=SMALL)
    trainer.begin_with(read_weights(tmp_path))
    assert trainer.step == 0
    ids = small_batch(tokenizer, seed=1).ids
    found, expected = (hidden_states(one.model, ids) for one in (trainer, published))
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=0.02)  # float16 weights


def test_rates_rise_stay_and_sink() -> None:
    rate = Rates(100, muon=1.0, adam=1.0, warmup_steps=10, decay_share=0.5).of(2.0)
    rates = [rate(mx.array(step)).item() for step in (0, 9, 40, 75, 100)]
    assert rates == pytest.approx([0.2, 2.0, 2.0, 1.0, 0.0])


def test_right_is_word_for_word() -> None:
    asked = next(one for one in held_out(HELD_OUT, 0) if one.task == "repeat")
    assert is_right(asked, asked.expected["content"])
    assert not is_right(asked, asked.expected["content"] + " ")


def test_a_call_is_right_whatever_the_order_of_its_arguments() -> None:
    asked = next(
        one
        for one in held_out(HELD_OUT, 0)
        if one.task == "tools"
        and len(json.loads(one.expected["tool_calls"][0]["function"]["arguments"])) > 1
    )
    function = asked.expected["tool_calls"][0]["function"]
    arguments = dict(reversed(json.loads(function["arguments"]).items()))
    call = json.dumps({"arguments": arguments, "name": function["name"]})
    assert is_right(asked, f"<tool_call>\n{call}\n</tool_call>")
    assert not is_right(asked, call)
    assert not is_right(asked, "<tool_call>\n{not json\n</tool_call>")
    wrong = json.dumps({"arguments": arguments, "name": "another"})
    assert not is_right(asked, f"<tool_call>\n{wrong}\n</tool_call>")
