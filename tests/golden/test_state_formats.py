"""Recurrent states saved in half precision: a request gets the same answer cold, warm, forked,
preempted, with drafts, compiled and after a restart.

Every run of the same tokens rounds its state at the same positions. So mlx-lm's own model generates
the same tokens if its caches are rounded there.
"""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from engine.mlx_backend.decode.choice import DecodePath
from engine.mlx_backend.kv.formats import HALF
from engine.mlx_backend.model.cached_model import CachedModel
from engine.values.request import Request, SamplingParams
from engine.values.settings import StateFormat
from engine.values.tokens import pack
from tests.checkpoints import FAMILIES
from tests.golden.compiling import compile_at_once, steps_of
from tests.golden.conftest import ATTENTION
from tests.golden.driving import Logits, random_tokens
from tests.golden.test_restarts import Daemon
from tests.offline import ChooseDecode, OfflineDaemon, Room, Served, load
from tests.unit.scripted_drafter import ScriptedDrafter

CASES = [
    ("qwen3_next", StateFormat.BF16),
    *((family, StateFormat.F16) for family in ("mamba2", "falcon_h1", "jamba", "rwkv7")),
    ("qwen3_next_q8", StateFormat.F16),
]
EVERY = Room(1).rounded_every
PROMPT, OUTPUT_TOKENS = random_tokens(53, seed=5), 40
SAMPLING = SamplingParams(temperature=0, top_logprobs=0)
NOISE = 5e-4
"""Log-probabilities of one text differ by less: float32 sums in another order, and what that sends
to the next number in half precision.
"""

LoadedIn = Callable[[str, StateFormat], Served]


@pytest.fixture(scope="session")
def served_in(checkpoint_of: Callable[[str], Path]) -> LoadedIn:
    """A family's model with its states saved in a format."""

    def served(family: str, format: StateFormat) -> Served:
        kv_format = FAMILIES[family].kv_format
        return load(checkpoint_of(family), kv_format=kv_format, state_format=format)

    return cache(served)


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def state_case(request: pytest.FixtureRequest) -> tuple[str, StateFormat]:
    """A family and how its states are saved."""
    family, format = request.param
    return family, format


@pytest.fixture
def served(state_case: tuple[str, StateFormat], served_in: LoadedIn) -> Served:
    return served_in(*state_case)


def an_engine(served: Served, decode: ChooseDecode | None = None, **room: int) -> OfflineDaemon:
    """Its clock stands still: no machine decides how many drafts are verified."""
    given = Room(**{"n_blocks": 64, **room})
    return OfflineDaemon(served, ATTENTION["gather"](), given, clock=lambda: 0.0, decode=decode)


def ask(name: str, prompt: Sequence[int] = PROMPT, n: int = 1) -> Request:
    return Request(name, pack(prompt), OUTPUT_TOKENS, SAMPLING, n=n)


def logprobs(daemon: OfflineDaemon, name: str, index: int = 0) -> list[float]:
    return [token.logprob for token in daemon.logprobs[name, index]]


def rounding_reference(model: Module, tokens: Sequence[int], format: StateFormat) -> Logits:
    """Log-probabilities after every token, `[tokens, vocabulary]`, by mlx-lm's model, whose states
    are rounded every EVERY tokens.
    """
    caches, found = make_prompt_cache(model), list[mx.array]()
    leaves = dict(tree_flatten([getattr(one, "caches", one) for one in caches])).values()
    for start in range(0, len(tokens), EVERY):
        chunk = mx.array([[*tokens[start : start + EVERY]]])
        found.append(model(chunk, cache=caches)[0].astype(mx.float32))
        for one in leaves if chunk.size == EVERY else ():
            if isinstance(one, ArraysCache):
                one.cache = [array.astype(HALF[format]).astype(array.dtype) for array in one.cache]
    logits = mx.concatenate(found)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def distance(found: Sequence[float], expected: Logits, prompt: int, said: Sequence[int]) -> float:
    own = expected[prompt - 1 : -1][np.arange(len(said)), np.array(said)]
    return float(np.abs(np.array(found) - own).max())


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_states_are_rounded_as_mlx_lms_caches_would_be(
    family: str, served_in: LoadedIn, peer_of: Callable[[str], Module]
) -> None:
    format, peer = StateFormat.BF16, peer_of(family)
    daemon = an_engine(served_in(family, format))
    said = daemon.serve(ask("cold"))["cold", 0]
    text, found = [*PROMPT, *said], logprobs(daemon, "cold")
    rounded = distance(found, rounding_reference(peer, text, format), len(PROMPT), said)
    exact = distance(found, rounding_reference(peer, text, StateFormat.F16), len(PROMPT), said)
    assert rounded < NOISE < exact / 3


def test_cold_warm_continued_and_forked(served: Served) -> None:
    daemon = an_engine(served)
    cold = daemon.serve(ask("cold"))["cold", 0]
    assert daemon.serve(ask("warm", n=3)) == {("warm", index): cold for index in range(3)}
    assert daemon.usage["warm"].cached_tokens == len(PROMPT) // EVERY * EVERY
    for index in range(3):
        assert logprobs(daemon, "warm", index) == pytest.approx(logprobs(daemon, "cold"), abs=NOISE)
    longer = [*PROMPT, *cold, *random_tokens(5, seed=6)]
    following = daemon.serve(ask("following", longer))["following", 0]
    assert daemon.usage["following"].cached_tokens == (len(PROMPT) + OUTPUT_TOKENS) // EVERY * EVERY
    fresh = an_engine(served)
    assert fresh.serve(ask("fresh", longer))["fresh", 0] == following
    assert logprobs(fresh, "fresh") == pytest.approx(logprobs(daemon, "following"), abs=NOISE)


def test_chunked_otherwise_in_a_crowd_and_preempted(served: Served) -> None:
    prompts = {f"r{at}": random_tokens(17 + 7 * at, seed=70 + at) for at in range(4)}
    crowd = [ask(name, prompt) for name, prompt in prompts.items()]
    alone = {
        (name, 0): an_engine(served).serve(ask(name, prompt))[name, 0]
        for name, prompt in prompts.items()
    }
    assert an_engine(served, step_tokens=9).serve(*crowd) == alone
    crowded = an_engine(served, n_blocks=26)
    assert crowded.serve(*crowd) == alone
    assert crowded.scheduler.metrics.preemptions > 0
    assert an_engine(served, spare=0).serve(*crowd) == alone


def test_drafts_right_and_wrong(served: Served) -> None:
    truth = an_engine(served).serve(ask("plain"))["plain", 0]
    script = [token + 1 if at % 11 == 5 else token for at, token in enumerate(truth)]
    daemon = an_engine(served)
    daemon.add(ask("drafted"))
    daemon.speculate("drafted", ScriptedDrafter(script))
    assert daemon.serve()["drafted", 0] == truth
    assert daemon.usage["drafted"].accepted_draft_tokens > OUTPUT_TOKENS // 5
    assert daemon.usage["drafted"].rejected_draft_tokens > 0


def test_compiled(served: Served) -> None:
    truth = an_engine(served).serve(ask("eager"))["eager", 0]
    paths = list[DecodePath]()

    def compiled(model: CachedModel) -> DecodePath:
        paths.append(compile_at_once(model))
        return paths[-1]

    daemon = an_engine(served, decode=compiled)
    assert daemon.serve(ask("compiled"))["compiled", 0] == truth
    assert steps_of(paths[0])[""] > OUTPUT_TOKENS // 2


def test_after_a_restart(served: Served, tmp_path: Path) -> None:
    prompt = random_tokens(301, seed=5)
    first = Daemon(served, tmp_path)
    expected, _ = first.serve("cold", prompt)
    first.end()
    second = Daemon(served, tmp_path)
    said, from_disk = second.serve("restarted", prompt)
    second.end()
    assert said == expected
    assert from_disk == len(prompt) // EVERY * EVERY


def test_other_states_are_another_disk_format(served_in: LoadedIn) -> None:
    formats = {
        an_engine(served_in("qwen3_next", format)).storage.kv_format
        for format in (StateFormat.FULL, StateFormat.F16, StateFormat.BF16)
    }
    assert len(formats) == 3
