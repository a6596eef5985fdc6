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
from tools.demo_model.curriculum import ALL, COPYING, Conversation, conversations
from tools.demo_model.forward import hidden_states
from tools.demo_model.score import Question, held_out, is_right
from tools.demo_model.tasks.knowledge import FACTS
from tools.demo_model.tasks.pick import LookUp, Pick
from tools.demo_model.tasks.recall import Recall
from tools.demo_model.tasks.repeat import Repeat
from tools.demo_model.tasks.tool_use import AnyNames, AnyValues, ToolAnswer, ToolCall
from tools.demo_model.tokens import sample, train_tokenizer
from tools.demo_model.train import CONFIG, Batch, Trainer, batch, batches
from tools.demo_model.words import Words, split_words

LEARNED, HELD_OUT = split_words()
SMALL = {**CONFIG, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(LEARNED, seed=0)


def some(count: int) -> list[Conversation]:
    return list(islice(conversations(ALL, LEARNED, Random(5)), count))


def words_of(words: Words) -> set[str]:
    return {word.lower() for listed in words.lists.values() for word in listed}


def test_no_word_is_on_both_sides() -> None:
    assert words_of(HELD_OUT)
    assert not words_of(LEARNED) & words_of(HELD_OUT)


def test_no_way_to_ask_is_on_both_sides() -> None:
    asked = {question for fact in FACTS.values() for question in fact["ask"]}
    kept = {question for fact in FACTS.values() for question in fact["held_out"]}
    assert len(kept) >= 2 * len(FACTS)
    assert not asked & kept


@pytest.mark.parametrize(
    "task",
    [
        Repeat(),
        Pick(),
        LookUp(),
        Recall(),
        ToolCall(),
        AnyNames(ToolCall()),
        AnyValues(ToolCall()),
        ToolAnswer(),
    ],
)
def test_held_out_prompts_exist_for_every_task(task: Task) -> None:
    """A tenth of each list is enough for whatever a task draws."""
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


def test_a_word_is_the_same_tokens_wherever_it_stands(tokenizer: PreTrainedTokenizerFast) -> None:
    def encode(text: str) -> Sequence[int]:
        ids: list[int] = tokenizer.encode(text)
        return ids

    word = encode("lighthouse")
    for text in (" lighthouse", '"lighthouse"', "\nlighthouse.", "the lighthouse, and"):
        ids = list(encode(text))
        assert any(ids[i : i + len(word)] == list(word) for i in range(len(ids)))


def test_batches_continue_where_they_stopped(tokenizer: PreTrainedTokenizerFast) -> None:
    def ids(first: int, count: int) -> list[list[list[int]]]:
        taken = islice(batches(tokenizer, LEARNED, 1, first), count)
        return [[half.ids.tolist() for half in halves] for halves in taken]  # type: ignore[misc]

    assert ids(0, 4)[2:] == ids(2, 2)


def test_targets_are_the_tokens_that_follow(tokenizer: PreTrainedTokenizerFast) -> None:
    [halves] = islice(batches(tokenizer, LEARNED, 1, 0), 1)
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
    model = Trainer(steps=10, seed=3, config=SMALL).model
    ids = small_batch(tokenizer, seed=1).ids
    found, expected = hidden_states(model, ids), model.model(ids)
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=1e-4)


def test_training_learns_and_goes_on_from_where_it_was_saved(
    tokenizer: PreTrainedTokenizerFast, on_cpu: None, tmp_path: Path
) -> None:
    halves = [small_batch(tokenizer, seed) for seed in (1, 2)]
    trainer = Trainer(steps=100, seed=0, config=SMALL)
    losses = [trainer.learn(halves) for _ in range(4)]
    assert losses[-1] < losses[0]
    trainer.save(tmp_path / "state.safetensors")
    resumed = Trainer(steps=100, seed=7, config=SMALL)
    resumed.resume(tmp_path / "state.safetensors")
    assert resumed.step == 4
    for _ in range(2):
        assert resumed.learn(halves) == pytest.approx(trainer.learn(halves), rel=1e-5)


def question(task: str) -> Question:
    return next(one for one in held_out(HELD_OUT, 0) if one.task == task)


def test_right_is_word_for_word() -> None:
    asked = question("repeat")
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
