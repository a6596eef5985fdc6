"""Prompts with images: each answer is that of one forward of the family's whole model, however the
prompt was cut, shared, preempted or crowded.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from engine.mlx_backend.model.attention import Attention
from engine.values.output import TokenLogprob
from engine.values.request import Request, SamplingParams
from engine.values.tokens import pack
from tests.golden.driving import random_tokens
from tests.golden.imaging import STEP_TOKENS, Prompt, Scene, WholeModel, load_with_images
from tests.offline import OfflineDaemon, Room, Served
from tests.vision_checkpoints import VISION_FAMILIES, write_vision_checkpoint

pytest.importorskip("mlx_vlm", reason="the packages for images are not installed")

FAST = ("qwen3_vl", "pixtral", "gemma3")
ROOM = Room(n_blocks=128, block_size=8, max_running=8, step_tokens=STEP_TOKENS)
GREEDY = SamplingParams(temperature=0, top_logprobs=5)
N_TOKENS = 8

TOLERANCES = {"qwen3_5": 1e-3}
"""Of log-probabilities; 1e-4 without an entry. Random recurrent weights amplify what is rounded."""


class Bench:
    """A family's model as it is served, and its whole model to compare with."""

    def __init__(self, scene: Scene, served: Served) -> None:
        self.scene, self.served = scene, served
        self.whole = WholeModel(scene)

    def daemon(self, room: Room = ROOM, attention: Attention | None = None) -> OfflineDaemon:
        return OfflineDaemon(self.served, attention or self.served.execution.attention, room)

    def text(self, n_tokens: int, seed: int) -> list[int]:
        """Tokens of text."""
        return random_tokens(n_tokens, seed)

    def expect(self, prompt: Prompt, said: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        """The answer is greedy by the whole model, and log-probabilities are the whole model's."""
        tokens, images = prompt
        assert len(said) == len(logprobs) == N_TOKENS
        logits = self.whole.logits([*tokens, *said], images)[len(tokens) - 1 : -1]
        expected = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        tolerance = TOLERANCES.get(self.scene.family, 1e-4)
        for own, token, found in zip(expected, said, logprobs, strict=True):
            assert own[token] > own.max() - tolerance
            for token_id, logprob in found.top:
                assert abs(own[token_id] - logprob) < tolerance


@pytest.fixture(scope="module")
def bench_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bench]:
    parent = tmp_path_factory.mktemp("towers")

    def make(family: str) -> Bench:
        checkpoint = write_vision_checkpoint(family, Path(parent))
        served = load_with_images(checkpoint)
        assert served.execution.images is not None, served.execution.images_refused
        return Bench(Scene(family, checkpoint), served)

    return cache(make)


@pytest.fixture(
    params=[
        pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
        for name in VISION_FAMILIES
    ]
)
def bench(request: pytest.FixtureRequest, bench_of: Callable[[str], Bench]) -> Bench:
    return bench_of(request.param)


def request_of(name: str, prompt: Prompt) -> Request:
    tokens, images = prompt
    return Request(
        name,
        pack(tokens),
        max_tokens=N_TOKENS,
        sampling=GREEDY,
        ignore_eos=True,
        images=images,
    )


def serve(daemon: OfflineDaemon, bench: Bench, prompts: Mapping[str, Prompt]) -> None:
    """All at once; each answer is the whole model's."""
    said = daemon.serve(*(request_of(name, prompt) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        bench.expect(prompt, said[name, 0], daemon.logprobs[name, 0])


def prompts_of(bench: Bench) -> dict[str, Prompt]:
    """Images at every place of a prompt."""
    scene, text = bench.scene, bench.text
    one, other = scene.image(1), scene.image(2, 3, 2)
    return {
        "middle": scene.prompt(text(9, 1), one, text(7, 2)),
        "first": scene.prompt(one, text(11, 3)),
        "two": scene.prompt(text(5, 4), one, text(6, 5), other, text(8, 6)),
        "in a row": scene.prompt(text(4, 7), one, other, text(5, 8)),
        "twice": scene.prompt(text(3, 9), other, text(4, 10), other, text(2, 11)),
        "text": scene.prompt(text(30, 12)),
    }


def test_alone(bench: Bench) -> None:
    for name, prompt in prompts_of(bench).items():
        serve(bench.daemon(), bench, {name: prompt})


def test_crowded(bench: Bench) -> None:
    serve(bench.daemon(), bench, prompts_of(bench))
