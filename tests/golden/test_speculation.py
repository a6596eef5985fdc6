"""Scheduler, store and runner with drafts on real models, also hybrids: the output is the same."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from mlx.nn.layers.base import Module

from engine.core.sequence import Step
from engine.mlx_backend.model.attention import Attention
from engine.mlx_backend.runner import Launch
from engine.values.request import Request, SamplingParams
from engine.values.tokens import pack
from measuring.random_checkpoint import VOCAB_SIZE
from tests.devices import SERVING_LAUNCH, launches
from tests.golden.conftest import EXACT_CASES
from tests.golden.driving import expect_greedy, random_tokens
from tests.offline import OfflineDaemon, Room, Served
from tests.unit.scripted_drafter import ScriptedDrafter

RECURRENT = ("lfm2", "mamba2", "qwen3_next", "rwkv7")
OUTPUT_TOKENS = 40
PROMPTS = {f"r{at}": random_tokens(13 + 9 * at, seed=70 + at) for at in range(3)}


@pytest.fixture(params=EXACT_CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A family and an attention strategy."""
    family, attention = request.param
    return family, attention


def drafting(
    served: Served, attention: Attention, n_blocks: int, launch: Launch = SERVING_LAUNCH
) -> OfflineDaemon:
    """Make a daemon whose clock stands still: no machine decides how many drafts are verified."""
    return OfflineDaemon(served, attention, Room(n_blocks), clock=lambda: 0.0, launch=launch)


def request(name: str, sampling: SamplingParams) -> Request:
    return Request(name, pack(PROMPTS[name]), OUTPUT_TOKENS, sampling)


def wrong(tokens: Sequence[int], places: Sequence[int]) -> list[int]:
    return [(token + 1) % VOCAB_SIZE if at in places else token for at, token in enumerate(tokens)]


def served_with(
    daemon: OfflineDaemon, scripts: Mapping[str, Sequence[int]], sampling: SamplingParams
) -> dict[str, Sequence[int]]:
    """Return the outputs where these scripts are drafted."""
    for name, script in scripts.items():
        daemon.add(request(name, sampling))
        daemon.speculate(name, ScriptedDrafter(script))
    said = daemon.serve()
    return {name: said[name, 0] for name in scripts}


def test_greedy(served: Served, peer: Module, attention: Attention) -> None:
    sampling = SamplingParams(temperature=0)
    plain = OfflineDaemon(served, attention, Room(64))
    truth = plain.serve(*(request(name, sampling) for name in PROMPTS))
    scripts = {
        "r0": truth["r0", 0],
        "r1": wrong(truth["r1", 0], (4, 9, 10, 23, 37)),
        "r2": wrong(truth["r2", 0], range(0, OUTPUT_TOKENS, 3)),
    }
    daemon = drafting(served, attention, 64)
    said = served_with(daemon, scripts, sampling)
    for name, prompt in PROMPTS.items():
        assert len(said[name]) == OUTPUT_TOKENS
        expect_greedy(peer, prompt, said[name])
    assert daemon.usage["r0"].accepted_draft_tokens > OUTPUT_TOKENS // 2
    assert daemon.usage["r1"].rejected_draft_tokens > 0
    assert daemon.scheduler.metrics.steps < plain.scheduler.metrics.steps
    again = daemon.serve(replace(request("r1", sampling), id="again"))
    expect_greedy(peer, PROMPTS["r1"], again["again", 0])


def test_seeded_and_preempted(served: Served, attention: Attention) -> None:
    """In an arena that has no room for all three, and under the other launch where there is one."""
    sampling = SamplingParams(seed=5, temperature=0.7, repetition_penalty=1.2, min_tokens=9)
    plain = OfflineDaemon(served, attention, Room(64))
    truth = plain.serve(*(request(name, sampling) for name in PROMPTS))
    scripts = {name: wrong(truth[name, 0], (7, 18, 29)) for name in PROMPTS}
    daemon = drafting(served, attention, 16, launches()[-1])
    assert served_with(daemon, scripts, sampling) == {name: truth[name, 0] for name in PROMPTS}


@pytest.mark.parametrize("case", [(name, "gather") for name in RECURRENT], ids="-".join)
@pytest.mark.parametrize("most", [1, 2])
def test_what_is_computed_again_may_take_several_steps(
    served: Served,
    attention: Attention,
    launch: Launch,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
) -> None:
    sampling = SamplingParams(temperature=0)
    truth = OfflineDaemon(served, attention, Room(64)).serve(request("r0", sampling))["r0", 0]
    monkeypatch.setattr(Step, "allow", lambda step, sequence: min(sequence.unplanned_tokens, most))
    daemon = drafting(served, attention, 64, launch)
    said = served_with(daemon, {"r0": wrong(truth, (4, 9, 10, 23, 37))}, sampling)
    assert said == {"r0": truth}
    assert daemon.usage["r0"].rejected_draft_tokens > 0


def test_four_outputs_of_one_request(served: Served, attention: Attention) -> None:
    """They share the prompt, and each has drafts of its own."""
    sampling = SamplingParams(seed=3, temperature=0.9)
    asked = replace(request("r0", sampling), n=4)
    truth = OfflineDaemon(served, attention, Room(64)).serve(asked)
    daemon = drafting(served, attention, 64)
    daemon.add(asked)
    drafters = [
        ScriptedDrafter(wrong(truth["r0", index], range(4 + index, OUTPUT_TOKENS, 9)))
        for index in range(4)
    ]
    daemon.speculate("r0", *drafters)
    assert daemon.rest(defaultdict(list)) == truth
    assert daemon.usage["r0"].accepted_draft_tokens > 0
