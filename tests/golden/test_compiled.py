"""Compiled decodes say what eager ones do, whatever happens to the batch."""

import math
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.core.step import Sampled, StepMasks, StepPlan, StepResult
from engine.drafts.sources import Draft
from engine.mlx_backend.decode import choice
from engine.mlx_backend.decode.choice import DecodePath
from engine.mlx_backend.model.attention import Attention
from engine.mlx_backend.model.cached_model import CachedModel
from engine.mlx_backend.runner import Launch, MlxRunner
from engine.mlx_backend.sampling.sampler import Sampler
from engine.values.request import Dry, Request, SamplingParams, Xtc
from engine.values.tokens import pack
from measuring.random_checkpoint import VOCAB_SIZE
from tests.devices import launches
from tests.golden.compiling import (
    UNFIT,
    Compiled,
    EagerRun,
    Outputs,
    compile_as_served,
    compile_at_once,
    expect_same_outputs,
    steps_of,
)
from tests.golden.conftest import ATTENTION, EXACT_CASES
from tests.golden.conftest import CASES as ALL_CASES
from tests.golden.driving import random_tokens
from tests.golden.test_adapters import NARROW, WIDE, adapter_configs
from tests.golden.test_failures import from_another_thread, poison
from tests.golden.test_overlap import Recorder, recorded_in
from tests.offline import OfflineDaemon, Room, Served, cached_model, load
from tests.unit.scripted_drafter import ScriptedDrafter

CASES = [case for case in ALL_CASES if case[0] not in UNFIT]
WINDOWED = ("gemma3_text", "gemma3n", "gemma4_text", "gpt_oss", "recurrent_gemma")
RECURRENT = ("qwen3_next", "qwen3_5", "falcon_h1", "jamba", "lfm2", "mamba2", "nemotron_h", "rwkv7")
LATENT = ("deepseek_v3", "deepseek_v32")
POISONED = {case for case in EXACT_CASES if case[0] not in LATENT}
"""Those whose storage is plain K and V, of which `poison` makes NaN."""

ROOM = Room(n_blocks=256, max_running=9)
GREEDY = SamplingParams(temperature=0, top_logprobs=0)
DRAWN = SamplingParams(seed=7, top_logprobs=0)

QUICK = {
    *(("qwen3", "gather"), ("qwen3", "cascade"), ("qwen3", "paged")),
    *(("gemma3_text", "gather"), ("gemma3_text", "paged"), ("qwen3_next", "gather")),
}
"""Full attention in all ways, windows, and states. The others are slow."""


def cases(each: Sequence[tuple[str, str]]) -> pytest.MarkDecorator:
    """Parametrize a test by family and attention."""
    params = [
        pytest.param(case, marks=() if case in QUICK else pytest.mark.slow, id="-".join(case))
        for case in each
    ]
    return pytest.mark.parametrize("case", params)


each_attention = cases([case for case in CASES if case[0] == "qwen3"])


def request(
    name: str, prompt_tokens: int, max_tokens: int, sampling: SamplingParams = DRAWN, **fields: Any
) -> Request:
    """After a prompt that begins as no prompt of another length does."""
    prompt = tuple(random_tokens(prompt_tokens, seed=prompt_tokens))
    return Request(name, pack(prompt), max_tokens, sampling, **fields)


def come_and_go(daemon: OfflineDaemon) -> Outputs:
    """One to nine rows of unlike lengths, which join and leave while others decode."""
    said = defaultdict[tuple[str, int], list[int]](list)
    for at in range(9):
        sampling = DRAWN if at % 2 else GREEDY
        daemon.add(request(f"r{at}", 3 + 5 * at, 14 + 23 * at % 50, sampling))
        daemon.step(5, said)
    return daemon.rest(said)


def compile_over_poison(model: CachedModel) -> DecodePath:
    """All storage holds NaN, as if broken requests had had its blocks and states."""
    poison(model.storage)
    return compile_at_once(model)


@cases(CASES)
def test_rows_come_and_go_and_grow(
    case: tuple[str, str], served: Served, attention: Attention
) -> None:
    """Over several widths of their tables, and numbers of rows that take lines of padding. What
    freed blocks and states held harms nobody.
    """
    decode = compile_over_poison if case in POISONED else compile_at_once
    run = expect_same_outputs(served, attention, ROOM, come_and_go, decode)
    assert run.steps.keys() == {""}
    assert run.steps[""] > 60


def preempt_and_fork(daemon: OfflineDaemon) -> Outputs:
    """In an arena that has too few blocks for all."""
    sampling = SamplingParams(
        seed=5, repetition_penalty=1.2, top_logprobs=2, xtc=Xtc(0.5, 0.02), dry=Dry(1.0)
    )
    said = daemon.serve(
        *(request(str(at), 19 + 4 * at, 30, sampling, n=1 + at % 2) for at in range(4))
    )
    assert daemon.scheduler.metrics.preemptions > 0
    assert daemon.store.counters.fork_copies > 0
    return said


TIGHT = Room(n_blocks=20)


@pytest.fixture(scope="module")
def preempted_of(
    served_of: Callable[[str], Served],
) -> Callable[[tuple[str, str]], tuple[EagerRun, Recorder]]:
    """An eager run of `preempt_and_fork` by a family and an attention strategy, and its steps."""

    @cache
    def preempted(case: tuple[str, str]) -> tuple[EagerRun, Recorder]:
        family, name = case
        recorders: list[Recorder] = []
        daemon = OfflineDaemon(served_of(family), ATTENTION[name](), TIGHT, recorded_in(recorders))
        return EagerRun.of(daemon, preempt_and_fork), recorders[0]

    return preempted


@pytest.fixture
def preempted(
    case: tuple[str, str], preempted_of: Callable[[tuple[str, str]], tuple[EagerRun, Recorder]]
) -> tuple[EagerRun, Recorder]:
    return preempted_of(case)


@cases(CASES)
def test_preempted_and_forked(
    served: Served, attention: Attention, preempted: tuple[EagerRun, Recorder]
) -> None:
    """Shapes are traced when the daemon would trace them, so eager steps come in between."""
    eager, _ = preempted
    run = expect_same_outputs(served, attention, TIGHT, preempt_and_fork, compile_as_served, eager)
    assert run.steps[""] > 10
    assert run.steps["a shape that is new"] > 0


@cases(CASES)
def test_plans_of_an_eager_run_give_the_same_tokens_when_they_are_compiled(
    served: Served, attention: Attention, preempted: tuple[EagerRun, Recorder]
) -> None:
    """Under each launch, and to the last bit under both."""
    _, recorder = preempted
    found = list[list[StepResult]]()
    for launch in launches():
        model = cached_model(served, attention, TIGHT)
        path = compile_at_once(model)
        runner = MlxRunner(model, Sampler(VOCAB_SIZE), launch, decode=path)
        found.append(list(replayed(recorder.calls, runner)))
        assert steps_of(path)[""] > 20
    assert found[-1] == found[0]
    assert tokens_of(found[0]) == tokens_of(recorder.results)


def replayed(calls: Sequence[bytes], runner: MlxRunner) -> Iterator[StepResult]:
    for call in map(pickle.loads, calls):
        match call:
            case StepPlan():
                runner.submit(call)
            case StepMasks():
                runner.launch()
                runner.draw(call)
            case _:
                yield runner.collect()


def tokens_of(results: Sequence[StepResult]) -> list[int]:
    rows = (row for result in results for row in result.rows)
    return [row.token.token_id for row in rows if isinstance(row, Sampled)]


@cases([(family, name) for family in WINDOWED for name in ATTENTION])
def test_windows_are_passed_by_far(served: Served, attention: Attention) -> None:
    """By rows whose blocks and windows begin at unlike steps, under each launch."""

    def scenario(daemon: OfflineDaemon) -> Outputs:
        return daemon.serve(*(request(f"r{at}", 5 + 5 * at, 80) for at in range(7)))

    eager = EagerRun.of(OfflineDaemon(served, attention, ROOM), scenario)
    for launch in launches():
        run = expect_same_outputs(served, attention, ROOM, scenario, eager=eager, launch=launch)
        assert run.steps[""] > 70


@cases([(family, "gather") for family in ("qwen3", "gemma3_text", *RECURRENT)])
def test_what_compiled_steps_have_left_is_taken_up_again(
    served: Served, attention: Attention
) -> None:
    """Blocks, slots of windows and saved states, by prompts that begin with prompt and answer."""

    def scenario(daemon: OfflineDaemon) -> Outputs:
        first = daemon.serve(request("cold", 45, 30), request("next to it", 12, 50))
        prompt = request("cold", 45, 30).prompt
        longer = (*prompt, *first["cold", 0], *random_tokens(5, seed=1))
        following = Request("following", pack(longer), 30, DRAWN)
        second = daemon.serve(following, request("again", 45, 30), request("other", 9, 40))
        assert daemon.usage["following"].cached_tokens > len(prompt)
        assert daemon.usage["again"].cached_tokens > 0
        assert second["again", 0] == first["cold", 0]
        return {**first, **second}

    run = expect_same_outputs(served, attention, ROOM, scenario)
    assert run.steps[""] > 60


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_5"])
def test_rows_of_several_adapters(
    family: str, name: str, checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """And of none, which are alone in the end."""
    checkpoint = checkpoint_of(family)
    served = load(checkpoint, adapters=adapter_configs(checkpoint, tmp_path))
    adapters = ("", WIDE, NARROW, WIDE, "")

    def scenario(daemon: OfflineDaemon) -> Outputs:
        lone = daemon.serve(request("adapted", 8, 20, adapter=WIDE))
        rows = [
            request(f"r{at}", 11 + at, 20 if adapter else 40, adapter=adapter)
            for at, adapter in enumerate(adapters)
        ]
        return {**lone, **daemon.serve(*rows)}

    run = expect_same_outputs(served, ATTENTION[name](), ROOM, scenario)
    assert run.steps.keys() == {""}
    assert run.steps[""] > 50


CHOSEN = (
    GREEDY,
    DRAWN,
    replace(DRAWN, top_k=20, top_p=0.9, top_logprobs=3),
    replace(DRAWN, temperature=0.8, repetition_penalty=1.3, presence_penalty=0.5),
    replace(GREEDY, frequency_penalty=0.4, logit_bias={5: 2.0, 9: -3.0}),
    replace(DRAWN, min_p=0.02, min_tokens=12),
    replace(DRAWN, allowed_token_ids=frozenset(range(0, VOCAB_SIZE, 3))),
    replace(GREEDY, bad_words=tuple((token,) for token in range(0, VOCAB_SIZE, 2))),
)


@cases([(family, "gather") for family in ("qwen3", "qwen3_next")])
def test_rows_whose_tokens_are_chosen_in_unlike_ways(served: Served, attention: Attention) -> None:
    """And whose answers end at a stop token, when nobody knows."""
    stop = frozenset(range(0, VOCAB_SIZE, 8))

    def scenario(daemon: OfflineDaemon) -> Outputs:
        rows = [
            request(f"r{at}", 4 + at, 40, sampling, stop_token_ids=stop if at == 5 else frozenset())
            for at, sampling in enumerate(CHOSEN)
        ]
        said = daemon.serve(*rows)
        assert 12 <= len(said["r5", 0]) < 40
        return said

    run = expect_same_outputs(served, attention, ROOM, scenario)
    assert run.steps.keys() == {""}
    assert run.steps[""] > 30


class Interrupted(ScriptedDrafter):
    """Drafts its script but for tokens in the middle."""

    def __call__(self, output: Sequence[int], most: int) -> Draft | None:
        return None if 12 <= len(output) < 28 else super().__call__(output, most)


@cases([(family, "gather") for family in ("llama", "gemma3_text", "qwen3_next", "mamba2", "rwkv7")])
def test_decodes_before_between_and_after_drafts(served: Served, attention: Attention) -> None:
    """Right ones and wrong ones, of a row next to another."""
    rows = [request("r0", 13, 40), request("r1", 22, 50)]
    script = list(OfflineDaemon(served, attention, ROOM).serve(*rows)["r0", 0])
    for at in (4, 9, 33):
        script[at] = (script[at] + 1) % VOCAB_SIZE

    def scenario(daemon: OfflineDaemon) -> Outputs:
        for row in rows:
            daemon.add(row)
        daemon.speculate("r0", Interrupted(script))
        said = daemon.serve()
        assert daemon.usage["r0"].accepted_draft_tokens > 5
        assert daemon.usage["r0"].rejected_draft_tokens > 0
        return said

    run = expect_same_outputs(served, attention, ROOM, scenario, clock=lambda: 0.0)
    assert run.steps[""] > 20


@cases([(family, "gather") for family in ("qwen3", "gemma3_text", "qwen3_next")])
def test_some_are_aborted_while_all_decode(served: Served, attention: Attention) -> None:
    """With a step in flight, under the other launch where there is one. One comes back, and finds
    what it had computed.
    """

    def scenario(daemon: OfflineDaemon) -> Outputs:
        said = defaultdict[tuple[str, int], list[int]](list)
        for at in range(5):
            daemon.add(request(f"r{at}", 6 + 3 * at, 40))
        daemon.step(15, said)
        for name in ("r1", "r3"):
            daemon.loop.abort(name)
        daemon.step(4, said)
        daemon.add(request("back", 9, 20))
        daemon.rest(said)
        assert daemon.usage["back"].cached_tokens == 8
        assert said["back", 0][: len(said["r1", 0])] == said["r1", 0][:20]
        return said

    run = expect_same_outputs(served, attention, ROOM, scenario, launch=launches()[-1])
    assert run.steps.keys() == {""}
    assert run.steps[""] > 30


@each_attention
def test_rows_that_are_better_computed_eagerly(served: Served, attention: Attention) -> None:
    """Where attention is shared by rows with a long prefix, they are not compiled; afterwards they
    are.
    """
    reason = "rows share a long prefix"

    def scenario(daemon: OfflineDaemon) -> Outputs:
        daemon.serve(request("shared", 40, 1))
        prompt = request("shared", 40, 1).prompt
        return daemon.serve(*(Request(f"r{n}", pack((*prompt, n)), 20 * n, DRAWN) for n in (1, 2)))

    run = expect_same_outputs(served, attention, ROOM, scenario)
    expected = {"", reason} if attention.name == "cascade" else {""}
    assert run.steps.keys() == expected
    assert run.steps[""] >= 19


@cases(CASES)
def test_rehearsals_find_the_same_logits(
    served: Served, attention: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the times alone decide."""
    monkeypatch.setattr(choice, "SLOW_STEP_SECONDS", math.inf)  # on a machine that others use, too
    model = cached_model(served, attention, Room(n_blocks=4))
    path = DecodePath("")
    path.choose(model, lambda line: None)
    assert "a compiled step takes, of an eager one's time" in path.why


@cases([(family, name) for family in UNFIT for name in ATTENTION])
def test_families_whose_decodes_cannot_be_compiled(
    family: str, served: Served, attention: Attention
) -> None:
    path = DecodePath("")
    path.choose(cached_model(served, attention, Room(n_blocks=4)), lambda line: None)
    assert path.compiled is None
    assert path.why == f"eager: {UNFIT[family]}"


def raise_while_tracing(*_: object) -> None:
    raise ValueError("no such trace")


def compute_nothing(step: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose first output nobody can compute: logits, or tokens. What a storage holds can
    be.
    """
    nothing = from_another_thread()

    def call(*inputs: Any) -> Any:
        first, *rest = step(*inputs)
        return (first + nothing, *rest)

    return call


@each_attention
def test_a_trace_that_fails_ends_in_eager_steps(
    served: Served, attention: Attention, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step at which it fails is computed all the same."""

    def scenario(daemon: OfflineDaemon) -> Outputs:
        said = defaultdict[tuple[str, int], list[int]](list)
        daemon.add(request("r0", 6, 60))
        daemon.step(12, said)
        with monkeypatch.context() as patched:
            patched.setattr(mx, "compile", lambda step: raise_while_tracing)
            daemon.add(request("r1", 9, 50))
            daemon.step(12, said)
        return daemon.rest(said)

    run = expect_same_outputs(served, attention, ROOM, scenario, launch=launch)
    problem = "ValueError: no such trace"
    assert run.steps.keys() == {"", problem}
    assert run.steps[""] < 12
    assert run.path.stats().why == f"eager: {problem}"


@each_attention
@pytest.mark.parametrize("part", ["forward", "draw"])
def test_a_compiled_step_that_cannot_be_computed_is_the_last_one(
    served: Served,
    attention: Attention,
    launch: Launch,
    part: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its rows are computed again, and decode eagerly as all later ones do."""
    compiled = Compiled(served, attention, ROOM, launch=launch)
    daemon = compiled.daemon
    expected = OfflineDaemon(served, attention, ROOM).serve(request("r0", 6, 40))
    assert daemon.serve(request("r0", 6, 40)) == expected
    n_compiled = compiled.steps[""]
    compile_function = mx.compile

    def compile_wrongly(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled_function = compile_function(function)
        is_draw = isinstance(function, partial)
        return (
            compute_nothing(compiled_function) if is_draw == (part == "draw") else compiled_function
        )

    monkeypatch.setattr(mx, "compile", compile_wrongly)
    rows = [request("failing", 9, 40), request("next to it", 11, 40)]
    assert daemon.serve(*rows) == OfflineDaemon(served, attention, ROOM).serve(*rows)
    assert daemon.scheduler.metrics.recomputed_sequences > 0
    assert daemon.serve(request("again", 6, 40))["again", 0] == expected["r0", 0]
    # The first draw of these rows is after their prompts.
    assert compiled.steps[""] == n_compiled + (part == "forward")
    assert compiled.path.stats().why.startswith("eager: RuntimeError")
