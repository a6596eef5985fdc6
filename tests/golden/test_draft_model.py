"""A draft model next to the model: texts are those without it, and take fewer steps."""

import json
import random
import shutil
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from engine.api import ModelError
from engine.core import draft_model
from engine.core.step import (
    DraftNext,
    DraftPlan,
    ModelRunner,
    NotDrafted,
    SequenceId,
    StepPlan,
)
from engine.mlx_backend.assembly import open_checkpoint
from engine.mlx_backend.draft_model import other_tokens
from engine.mlx_backend.draft_runner import DraftRunner
from engine.mlx_backend.model.attention import Attention
from engine.mlx_backend.model.cached_model import CachedModel
from engine.mlx_backend.runner import Launch
from engine.mlx_backend.sampling.sampler import Sampler
from engine.values.request import Request, SamplingParams
from engine.values.settings import EngineConfig
from engine.values.stats import DraftSource
from engine.values.tokens import pack
from kvstore.ops import TablePatch
from kvstore.store import KVStore
from tests.checkpoints import FAMILIES, write_family
from tests.devices import SERVING_LAUNCH
from tests.golden.compiling import OtherRunner, compile_at_once
from tests.golden.driving import random_tokens
from tests.golden.test_failures import from_another_thread
from tests.offline import ChooseDecode, OfflineDaemon, Room, Served, cached_model, load

N_REQUESTS = 200
TARGET_BLOCKS, DRAFT_BLOCKS = 14, 16
"""Of 8 tokens: too few for all running sequences, so that some are preempted."""


def _write_pruned(checkpoint: Path, directory: Path) -> Path:
    """A copy of a checkpoint without its last layer."""
    shutil.copytree(checkpoint, directory)
    config = json.loads((directory / "config.json").read_text())
    last = config["num_hidden_layers"] = config["num_hidden_layers"] - 1
    (directory / "config.json").write_text(json.dumps(config))
    weights = mx.load(str(checkpoint / "model.safetensors"))
    assert isinstance(weights, dict)
    kept = {name: array for name, array in weights.items() if f"layers.{last}." not in name}
    mx.save_safetensors(str(directory / "model.safetensors"), kept, {"format": "mlx"})
    return directory


@pytest.fixture(scope="module")
def target(served_of: Callable[[str], Served]) -> Served:
    return served_of("llama")


@pytest.fixture(scope="module")
def drafts(
    target: Served, checkpoint_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Served]:
    """Draft models, by how they are related to the model."""
    parent = tmp_path_factory.mktemp("drafts")
    pruned = _write_pruned(checkpoint_of("llama"), parent / "pruned")
    return {
        "identical": target,
        "pruned": load(pruned),
        "random": load(write_family(FAMILIES["llama"], parent, seed=1)),
    }


def drafting(
    target: Served,
    draft: Served,
    n_blocks: int = 128,
    n_draft_blocks: int = 128,
    watch: Callable[[ModelRunner], ModelRunner] = lambda runner: runner,
    launch: Launch = SERVING_LAUNCH,
    decode: ChooseDecode | None = None,
) -> OfflineDaemon:
    """A daemon with a draft model, whose clock stands still: no machine decides what is drafted."""
    return OfflineDaemon(
        target,
        Attention(),
        Room(n_blocks),
        watch,
        clock=lambda: 0.0,
        launch=launch,
        decode=decode,
        draft=(draft, Room(n_draft_blocks)),
    )


def random_requests(seed: int) -> list[Request]:
    """Requests with common beginnings, greedy and seeded, also with several outputs."""
    draw = random.Random(seed)
    beginnings = [random_tokens(draw.randrange(4, 24), seed=index) for index in range(6)]
    ways = (
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=20),
        SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.2, top_logprobs=1),
        SamplingParams(temperature=0, frequency_penalty=0.5, min_tokens=4),
    )
    return [
        Request(
            f"r{index}",
            pack([*draw.choice(beginnings), *random_tokens(draw.randrange(1, 9), seed=index)]),
            draw.randrange(4, 40),
            replace(draw.choice(ways), seed=draw.randrange(1 << 40)),
            n=draw.choice((1, 1, 1, 2)),
        )
        for index in range(N_REQUESTS)
    ]


def expect_all_back(store: KVStore | None) -> None:
    """Every block is free, or cached and held by no sequence."""
    assert store is not None
    assert not store.leases
    assert not store.ended
    assert store.available_blocks == store.pool.n_blocks


@pytest.mark.parametrize("relation", ["identical", "pruned", "random"])
def test_the_same_is_said(
    target: Served, drafts: Mapping[str, Served], launch: Launch, relation: str
) -> None:
    """Also where sequences are preempted and requests are aborted, in arenas that are too small."""
    requests = random_requests(seed=len(relation))
    plain = OfflineDaemon(target, Attention(), Room(4096), max_waiting=8 * N_REQUESTS)
    truth = plain.serve(*requests)
    daemon = drafting(target, drafts[relation], TARGET_BLOCKS, DRAFT_BLOCKS, launch=launch)
    draw, aborted = random.Random(relation), set[str]()
    said = defaultdict[tuple[str, int], list[int]](list)
    waiting = list(reversed(requests))
    while waiting or not daemon.loop.is_idle:
        while waiting and len(daemon.scheduler.live) < 12:
            daemon.add(waiting.pop())
        daemon.step(1, said)
        if daemon.scheduler.live and draw.random() < 0.1:
            victim = draw.choice(daemon.scheduler.live).request.id
            daemon.loop.abort(victim)
            aborted.add(victim)
    for key, tokens in truth.items():
        expected = tokens[: len(said[key])] if key[0] in aborted else tokens
        assert said[key] == expected, key
    metrics = daemon.scheduler.metrics
    assert metrics.preemptions > 0
    assert len(aborted) > 5
    assert metrics.drafts[DraftSource.MODEL].drafted_tokens > 0
    expect_all_back(daemon.store)
    expect_all_back(daemon.draft_store)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("decode", [None, compile_at_once], ids=["eager", "compiled"])
def test_an_identical_model_halves_the_steps(
    served_of: Callable[[str], Served],
    family: str,
    temperature: float,
    decode: ChooseDecode | None,
) -> None:
    served = served_of(family)
    requests = [
        Request(
            f"r{index}",
            pack(random_tokens(13 + 9 * index, seed=70 + index)),
            64,
            SamplingParams(temperature=temperature, seed=index),
        )
        for index in range(4)
    ]
    plain = OfflineDaemon(served, Attention(), Room(128))
    truth = plain.serve(*requests)
    daemon = drafting(served, served, decode=decode)
    assert daemon.serve(*requests) == truth
    assert daemon.scheduler.metrics.steps <= 0.5 * plain.scheduler.metrics.steps
    counts = daemon.scheduler.metrics.drafts[DraftSource.MODEL]
    assert counts.accepted_tokens > 0.7 * counts.drafted_tokens


class Recorder(OtherRunner):
    """A runner that keeps the plans which it is given."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        super().submit(plan)

    def known_tokens(self) -> int:
        """Tokens that the draft model has computed for it to draft after, since the last call."""
        plans, self.plans = self.plans, []
        return sum(
            len(row.tokens) for plan in plans if plan.draft is not None for row in plan.draft.rows
        )


def recorded(target: Served, draft: Served) -> tuple[OfflineDaemon, Recorder]:
    recorders = list[Recorder]()

    def watch(runner: ModelRunner) -> ModelRunner:
        recorders.append(Recorder(runner))
        return recorders[-1]

    return drafting(target, draft, watch=watch), recorders[0]


def turns(served: Served) -> Iterator[tuple[str, Sequence[int]]]:
    """Names and prompts of a conversation's turns."""
    yield "first", random_tokens(60, seed=3)
    plain = OfflineDaemon(served, Attention(), Room(128))
    answer = plain.serve(conversation_request("first", random_tokens(60, seed=3)))["first", 0]
    yield "next", [*random_tokens(60, seed=3), *answer, *random_tokens(5, seed=4)]


def conversation_request(name: str, prompt: Sequence[int]) -> Request:
    return Request(name, pack(prompt), 30, SamplingParams(temperature=0))


def test_what_the_draft_model_has_computed_is_not_computed_again(target: Served) -> None:
    """A prompt once, an answer as it is drafted, and of the next turn only what is new."""
    daemon, recorder = recorded(target, target)
    computed = list[int]()
    for name, prompt in turns(target):
        daemon.serve(conversation_request(name, prompt))
        computed.append(recorder.known_tokens())
    assert 60 <= computed[0] <= 60 + 8
    assert computed[1] <= 5 + 8 + 8  # and the rest of a draft that the end of the answer cut


def test_a_sequence_that_is_not_to_be_drafted_for_is_not_followed(target: Served) -> None:
    daemon, recorder = recorded(target, target)
    request = replace(conversation_request("r", random_tokens(20, seed=1)), speculate=False)
    daemon.serve(request)
    assert all(plan.draft is None for plan in recorder.plans)


def test_a_draft_model_that_fails_is_given_up(
    target: Served, drafts: Mapping[str, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = drafts["pruned"]
    request = conversation_request("r", random_tokens(20, seed=1))
    truth = OfflineDaemon(target, Attention(), Room(64)).serve(request)
    forward, n_left = CachedModel.forward, 6

    def fail(self: CachedModel, *args: object) -> object:
        nonlocal n_left
        if self.model is draft.loaded.model:
            n_left -= 1
            if n_left < 0:
                raise RuntimeError("injected")
        return forward(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(CachedModel, "forward", fail)
    daemon = drafting(target, draft)
    assert daemon.serve(request) == truth
    assert n_left == -1, "it was not tried again"
    assert daemon.serve(replace(request, id="again"))["again", 0] == truth["r", 0]
    expect_all_back(daemon.draft_store)


def test_a_draft_model_that_has_lacked_memory_drafts_again(
    target: Served, drafts: Mapping[str, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = drafts["pruned"]
    request = conversation_request("r", random_tokens(20, seed=1))
    truth = OfflineDaemon(target, Attention(), Room(64)).serve(request)
    forward, calls = CachedModel.forward, list[int]()

    def lack_once(self: CachedModel, *args: object) -> object:
        if self.model is draft.loaded.model:
            calls.append(1)
            if len(calls) == 6:
                raise RuntimeError("[malloc] Unable to allocate 137438953472 bytes.")
        return forward(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(CachedModel, "forward", lack_once)
    monkeypatch.setattr(draft_model, "MEMORY_REST_STEPS", 2)
    daemon = drafting(target, draft)
    assert daemon.serve(request) == truth
    assert len(calls) > 10
    expect_all_back(daemon.draft_store)


def test_known_tokens_are_waited_for_where_nothing_is_drafted(target: Served) -> None:
    """Else their time, and their failure, would be the next step's."""
    model = cached_model(target, Attention(), Room(4))
    runner = DraftRunner(model, Sampler(target.layout.vocab_size), target.layout.vocab_size)
    name = SequenceId(1)
    patches = [(name, TablePatch(None, 0, (0, 1)))]
    plan = DraftPlan([DraftNext(name, 0, (5, 6, 7))], patches=patches)
    assert runner.draft(plan, {}, launch_nothing) == {name: ()}
    layer = model.storage.full.layers[0]
    layer.planes = tuple(plane + from_another_thread() for plane in layer.planes)
    assert runner.draft(plan, {}, launch_nothing) is NotDrafted.FAILED


def launch_nothing(forwards: Iterator[list[mx.array]]) -> None:
    """Build all forwards, and leave it to the runner to compute them."""
    deque(forwards, maxlen=0)


def test_a_cleared_cache_has_nothing_of_the_draft_model(target: Served) -> None:
    daemon, recorder = recorded(target, target)
    daemon.serve(conversation_request("r", random_tokens(60, seed=3)))
    recorder.known_tokens()
    daemon.loop.clear()
    while daemon.loop.forget_cleared() is not None:
        pass
    assert daemon.draft_store is not None
    assert daemon.draft_store.pool.n_free == daemon.draft_store.pool.n_blocks
    daemon.serve(conversation_request("again", random_tokens(60, seed=3)))
    assert recorder.known_tokens() >= 60


@pytest.mark.parametrize(
    ("found", "difference"),
    [
        ({0: "a", 1: "b"}, ""),
        ({0: "a", 1: "c"}, "1 tokens differ, the first of which has the id 1: 'c'"),
        ({0: "b", 1: "a"}, "2 tokens differ, the first of which has the id 0: 'b'"),
        ({0: "a"}, "the id 1: none in the draft model, 'b' in the model"),
        ({0: "a", 1: "b", 2: "c"}, "the id 2: 'c' in the draft model, none in the model"),
    ],
)
def test_tokenizers_are_compared_token_by_token(found: dict[int, str], difference: str) -> None:
    problem = other_tokens({0: "a", 1: "b"}, found)
    assert difference in problem
    assert bool(problem) == bool(difference)


def test_another_tokenizer_is_refused(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Of the same size."""
    other = shutil.copytree(checkpoint_of("llama"), tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, another = sorted(vocabulary)[5:7]
    vocabulary[one], vocabulary[another] = vocabulary[another], vocabulary[one]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = EngineConfig(str(checkpoint_of("llama")), draft_model=str(other))
    with pytest.raises(ModelError, match="its tokenizer is another one: 2 tokens differ"):
        open_checkpoint(config, checkpoint_of("llama"))


def test_a_recurrent_draft_model_is_refused(checkpoint_of: Callable[[str], Path]) -> None:
    config = EngineConfig(str(checkpoint_of("llama")), draft_model=str(checkpoint_of("qwen3_next")))
    with pytest.raises(ModelError, match=r"draft_model .*qwen3_next.* recurrent layers"):
        open_checkpoint(config, checkpoint_of("llama"))


def test_a_draft_model_whose_groups_do_not_fit_into_blocks_is_refused(
    checkpoint_of: Callable[[str], Path],
) -> None:
    """The model has no such groups: its blocks may have any size."""
    target, draft = checkpoint_of("llama"), checkpoint_of("deepseek_v41")
    config = EngineConfig(str(target), draft_model=str(draft), block_size=6)
    with pytest.raises(ModelError, match=r"draft_model .*deepseek_v41.* groups of 4 tokens"):
        open_checkpoint(config, target)


def test_the_memory_of_both_is_planned(checkpoint_of: Callable[[str], Path]) -> None:
    """For each block of the model there is one of its draft model."""
    checkpoint = checkpoint_of("gemma3_text")
    alone = EngineConfig(str(checkpoint), max_model_len=512, kv_cache_bytes=64 << 20)
    both = replace(alone, draft_model=str(checkpoint_of("llama")))
    plan = open_checkpoint(alone, checkpoint).plan(alone)
    joint = open_checkpoint(both, checkpoint).plan(both)
    of_draft = open_checkpoint(alone, checkpoint_of("llama"))
    assert joint.weight_bytes == plan.weight_bytes + of_draft.loaded.weight_bytes
    assert joint.memory.total_bytes - joint.weight_bytes <= plan.memory.total_bytes
    assert joint.sizes.n_blocks < plan.sizes.n_blocks
    block_bytes = plan.footprint.block_bytes + of_draft.plan(alone).footprint.block_bytes
    assert joint.stored.block == block_bytes
