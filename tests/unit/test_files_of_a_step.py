"""How many files a reader has to open to follow a step through the engine.

A step of a sequence that only decodes, and one that verifies a draft, run on the hash model with
everything that the daemon has switched on; every call of a function is recorded by its file.
"""

import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import FrameType

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.core.drafting import DraftPolicy
from engine.core.inbox import Inbox
from engine.core.loop import EngineLoop
from engine.core.metrics import Metrics
from engine.core.scheduler import Scheduler
from engine.core.step import Decode, Limits, StepPlan, Verify
from engine.output.text import detokenizer_factory, output_factory
from engine.values.output import OutputEvent
from engine.values.request import Request, SamplingParams
from engine.values.tokens import pack
from kvstore.pool import BlockPool
from kvstore.sizes import StorageBytes
from kvstore.store import KVStore
from kvstore.tree import RadixTree
from tests.simulation.fake_runner import FakeRunner
from tests.unit.engine_harness import VOCAB_SIZE, prompt

ROOT = Path(__file__).parents[2]
BLOCK_SIZE = 4
MOST_FILES_OF_A_DECODE = 15
MOST_FILES_WITHOUT_A_DRAFT = 20
MOST_FILES_OF_A_DRAFT = 26
STEPS_SKIPPED = 2
"""The first steps of an answer enter the batch; what is asked for is the steady state."""


class Recorder(FakeRunner):
    """The hash model, which keeps the plans that it was given."""

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool, (), BLOCK_SIZE, VOCAB_SIZE, lambda: None, lambda sequence_id: False)
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        super().submit(plan)


class Engine:
    """The engine's loop, turned by hand."""

    def __init__(self) -> None:
        pool = BlockPool(64)
        self.store = KVStore(pool, RadixTree(pool, BLOCK_SIZE), BLOCK_SIZE)
        self.runner = Recorder(pool)
        self.limits = Limits(
            vocab_size=VOCAB_SIZE,
            max_context_tokens=200,
            arena_tokens=200,
            max_running=4,
            max_waiting=4,
            step_tokens=32,
            step_stretch=4.0,
        )
        milliseconds = count()
        drafts = DraftPolicy(self.store)
        self.scheduler = Scheduler(
            self.store,
            output_factory(frozenset(), detokenizer_factory(_tokenizer())),
            self.limits,
            lambda: 7,
            Metrics(lambda: next(milliseconds) / 1000),
            drafts=drafts,
        )
        self.events: list[OutputEvent] = []
        self.loop = EngineLoop(
            self.scheduler,
            self.runner,
            Inbox(),
            self.events.extend,
            StorageBytes(block=0, slots=(), arenas=0),
        )

    def serve(self, request: Request, turn: Callable[[], None]) -> tuple[int, ...]:
        """Take turns until the request has ended. Returns its tokens."""
        self.events.clear()
        self.scheduler.add(self.scheduler.prepare(request), 0.0)
        while not self.loop.is_idle:
            turn()
        return tuple(token for event in self.events for token in event.token_ids)


def test_a_plain_decode_passes_few_files() -> None:
    engine = Engine()
    files = _files_of_turns(engine, _request("plain", speculate=False), Decode)
    assert "engine/core/loop.py" in files
    assert "kvstore/store.py" in files
    assert "engine/output/text.py" in files
    assert len(files) <= MOST_FILES_OF_A_DECODE, "\n".join(sorted(files))


def test_a_decode_for_which_no_draft_is_found_passes_few_files() -> None:
    files = _files_of_turns(Engine(), _request("plain"), Decode)
    assert "engine/drafts/sources.py" in files
    assert len(files) <= MOST_FILES_WITHOUT_A_DRAFT, "\n".join(sorted(files))


def test_a_verified_draft_passes_few_files() -> None:
    engine = Engine()
    answer = engine.serve(_request("first"), engine.loop.turn)
    engine.loop.clear()
    again = _request("again", prediction=answer)
    files = _files_of_turns(engine, again, Verify)
    assert "engine/core/drafting.py" in files
    assert len(files) <= MOST_FILES_OF_A_DRAFT, "\n".join(sorted(files))


def _request(name: str, prediction: tuple[int, ...] = (), speculate: bool = True) -> Request:
    return Request(
        name,
        pack(prompt(1, 9)),
        40,
        SamplingParams(seed=3),
        speculate=speculate,
        prediction=pack(prediction),
    )


def _files_of_turns(engine: Engine, request: Request, kind: type[Decode | Verify]) -> set[str]:
    """The files of the engine and the store, without MLX, of all steady turns that plan a row of
    this kind.
    """
    found, turns = set[str](), 0

    def turn() -> None:
        nonlocal turns
        before, files = len(engine.runner.plans), set[str]()
        sys.setprofile(lambda frame, event, _: _record(files, frame, event))
        try:
            engine.loop.turn()
        finally:
            sys.setprofile(None)
        rows = [row for plan in engine.runner.plans[before:] for row in plan.rows]
        if rows and all(isinstance(row, kind) for row in rows):
            turns += 1
            if turns > STEPS_SKIPPED:
                found.update(files)

    engine.serve(request, turn)
    assert turns > STEPS_SKIPPED, "no steady turn"
    return found


def _record(files: set[str], frame: FrameType, event: str) -> None:
    path = Path(frame.f_code.co_filename)
    if event != "call" or not path.is_relative_to(ROOT):
        return
    name = path.relative_to(ROOT).as_posix()
    if name.startswith(("engine/", "kvstore/")) and "mlx_backend" not in name:
        files.add(name)


def _tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {chr(0x41 + i): i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="A"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
