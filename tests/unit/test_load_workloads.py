"""Workloads are frozen: the same everywhere, of the size that their scenario states."""

import hashlib

import pytest
from pydantic import ValidationError

from load_tests.scenarios.kinds import Load, load_scenario, scenario_names
from load_tests.scenarios.workloads import build
from load_tests.shapes import CONFIGS
from load_tests.tokenizer import WORDS, build_tokenizer, word_ids

CONVERSATIONS = Load(
    description="",
    concurrency=2,
    conversations=5,
    turns=3,
    waves=2,
    system_prompts=2,
    system_words=70,
    user_words=10,
    output_tokens=4,
)


def test_a_seed_gives_the_same_texts_on_every_machine() -> None:
    assert build(CONVERSATIONS, 7) == build(CONVERSATIONS, 7)
    assert build(CONVERSATIONS, 7) != build(CONVERSATIONS, 8)
    digest = hashlib.sha256(repr(build(CONVERSATIONS, 7)).encode()).hexdigest()
    assert digest.startswith("b5b28c8b3ad5524d")


def test_every_wave_has_the_same_conversations() -> None:
    first, second = build(CONVERSATIONS, 0).waves
    assert first == second
    assert len(first) == 5


def test_system_prompts_are_dealt_in_turn() -> None:
    (wave, _) = build(CONVERSATIONS, 0).waves
    systems = [conversation.system for conversation in wave]
    assert systems[0] == systems[2] == systems[4] != systems[1] == systems[3]


def test_without_system_prompts_nobody_has_one() -> None:
    scenario = CONVERSATIONS.model_copy(update={"system_prompts": 0, "waves": 1})
    (wave,) = build(scenario, 0).waves
    assert {conversation.system for conversation in wave} == {None}


def test_user_texts_are_all_different() -> None:
    (wave, _) = build(CONVERSATIONS, 0).waves
    assert len({text for conversation in wave for text in conversation.turns}) == 15


def test_a_word_is_a_token_and_text_comes_back_to_the_same_tokens() -> None:
    tokenizer = build_tokenizer()
    ids = word_ids(tokenizer)
    assert len(set(ids)) == len(WORDS)
    assert tokenizer.encode("".join(f"{word} " for word in WORDS)).ids == ids
    assert tokenizer.encode(tokenizer.decode(ids)).ids == ids


@pytest.mark.parametrize("size", {config["vocab_size"] for config in CONFIGS.values()})
def test_the_tokenizer_fills_the_vocabulary(size: int) -> None:
    tokenizer = build_tokenizer(size)
    assert tokenizer.get_vocab_size() == size
    assert tokenizer.token_to_id("<|im_end|>") not in word_ids(tokenizer)


def test_the_tokenizer_keeps_every_byte_of_any_text() -> None:
    text = "Größe:\n  x = 3 naïve katofu\tkato 🌱"
    tokenizer = build_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize("name", scenario_names())
def test_scenarios_can_be_read(name: str) -> None:
    scenario = load_scenario(name)
    assert scenario.description
    if isinstance(scenario, Load):
        (first, *_) = build(scenario, 0).waves
        assert len(first) == scenario.conversations
        assert scenario.concurrency <= scenario.conversations


@pytest.mark.parametrize("name", scenario_names())
def test_for_trying_it_a_scenario_has_less_work(name: str) -> None:
    scenario = load_scenario(name)
    quick = scenario.quick()
    assert type(quick) is type(scenario)
    assert quick != scenario


def test_the_scenarios_are_those_of_the_documentation() -> None:
    assert scenario_names() == [
        "burst",
        "disk-unique",
        "hybrid",
        "long-prompt",
        "multi-turn",
        "real-agent",
        "real-burst",
        "real-shared",
        "real-unique-1",
        "real-unique-32",
        "real-unique-8",
        "resend",
        "restart",
        "restart-wide",
        "shared",
        "unique-1",
        "unique-32",
        "unique-8",
    ]


def test_an_unknown_parameter_is_an_error() -> None:
    with pytest.raises(ValidationError, match="user_wrods"):
        Load.model_validate({**CONVERSATIONS.model_dump(), "user_wrods": 3})
