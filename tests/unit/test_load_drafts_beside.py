"""What drafts save beside other servers: the texts, the draft model, what is said of it all."""

import random

import numpy as np
import pytest

from load_tests.client import TargetError
from load_tests.drafts.beside import (
    USUAL,
    Figures,
    expect_alike,
    loads,
    table,
)
from load_tests.drafts.draft_model import first_layer
from load_tests.lexicon import WORDS

ALL = loads(random.Random(1), USUAL)


def following(word: str) -> list[str]:
    """What the successor model says behind it."""
    at = WORDS.index(word) + 1
    return list(WORDS[at : at + USUAL.output_tokens])


def prompts(name: str) -> list[list[str]]:
    return [prompt.split() for load in ALL if load.name == name for prompt in load.prompts]


def test_a_copy_is_in_the_prompt() -> None:
    for words in prompts("copy"):
        assert len(words) == USUAL.prompt_words + 1
        assert following(words[-1]) == words[1 : 1 + USUAL.output_tokens]


@pytest.mark.parametrize("name", ["new", "resend"])
def test_what_is_new_is_in_no_prompt(name: str) -> None:
    for words in prompts(name):
        assert len(words) == USUAL.prompt_words + 1
        assert not set(following(words[-1])) & set(words)


def test_no_prompt_comes_twice_but_to_be_sent_again() -> None:
    asked = [prompt for load in ALL for prompt in load.prompts]
    assert len(set(asked)) == len(asked)
    assert all(load.before == (load.prompts if load.name == "resend" else ()) for load in ALL)


def test_the_draft_model_has_the_first_layer_alone() -> None:
    names = ["model.embed_tokens.weight", "model.layers.0.a", "model.layers.10.a", "lm_head.weight"]
    kept = first_layer({name: np.zeros(1, np.float32) for name in names})
    assert list(kept) == [names[0], names[1], names[3]]


def test_servers_that_say_something_else_are_found_out() -> None:
    said = {"one": {"copy": ("a", "b")}, "two": {"copy": ("a", "b")}}
    expect_alike(said)
    with pytest.raises(TargetError, match="copy: three says other than one"):
        expect_alike({**said, "three": {"copy": ("a", "c")}})


def test_ratios_say_how_many_times_as_fast_the_first_is() -> None:
    found = table(
        [
            Figures("copy", "ours", (100.0, 200.0, 300.0)),
            Figures("copy", "other", (50.0, 50.0, 100.0)),
        ]
    )
    assert found.columns == ("load", "ours", "other")
    assert found.rows == (("copy", "200 (1.00)", "50 (3.00)"),)
