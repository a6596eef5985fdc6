"""A tool loop computes only what is new: the cache holds the last prompt and its answer."""

import random

import pytest
from transformers import AutoTokenizer

from engine.mlx_backend.loading.checkpoint import DEFAULT_CHECKPOINT
from engine.mlx_backend.model.attention import Attention
from engine.values.request import Request, SamplingParams
from engine.values.tokens import pack
from tests.answering import (
    FAMILIES,
    THINKING,
    Answer,
    Conversation,
    checkpoint_with,
)
from tests.offline import OfflineDaemon, Room, load

ANSWER_TOKENS = 24


@pytest.mark.parametrize("name", ["hermes", "qwen3", "qwen3 opening", "qwen3 not thinking"])
def test_ten_steps_adopt_all_but_the_last_token(name: str) -> None:
    """Whatever tokens the model happens to generate for the call."""
    family = FAMILIES[name]
    checkpoint = checkpoint_with(AutoTokenizer.from_pretrained(DEFAULT_CHECKPOINT), family.template)
    daemon = OfflineDaemon(load(DEFAULT_CHECKPOINT), Attention(), Room(128))
    talk = Conversation(family, checkpoint, random.Random(0))
    talk.asks("What is the weather?")
    reasoning = "Let me look." if name in THINKING else ""
    known = 0
    for step in range(10):
        prompt = talk.prompt()
        request = Request(
            f"step {step}", pack(prompt), ANSWER_TOKENS, SamplingParams(temperature=1, seed=step)
        )
        answer = daemon.serve(request)[request.id, 0]
        assert daemon.usage[request.id].cached_tokens == max(known - 1, 0)
        known = len(prompt) + len(answer)
        talk.answers(Answer((("look", {"step": step}),), reasoning=reasoning), answer)
        talk.returns("cold")
