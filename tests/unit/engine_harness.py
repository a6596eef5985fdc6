"""A scheduler over a real store and the hash model, driven step by step."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import count

from engine.core.drafting import DraftPolicy
from engine.core.metrics import Metrics
from engine.core.scheduler import Scheduler
from engine.core.sequence import LiveSequence, Step
from engine.core.step import (
    NO_STEP_MASKS,
    Decode,
    Limits,
    Prefill,
    Resample,
    Row,
    SequenceId,
    StepPlan,
    Verify,
)
from engine.disk_cache.cache import DiskCache
from engine.drafts.proposer import MakeDraft, Proposer, first_rates
from engine.output.text import output_factory
from engine.values.images import Image, ImageInput
from engine.values.output import FinishReason, OutputEvent, Usage
from engine.values.request import Pooling, Request, SamplingParams
from engine.values.tokens import pack
from kvstore import invariants
from kvstore.pool import BlockPool
from kvstore.slots import Group
from kvstore.store import KVStore
from kvstore.tree import RadixTree
from tests.simulation.daemon import LetterDetokenizer
from tests.simulation.fake_runner import FakeRunner
from tests.unit.scripted_drafter import ScriptedPolicy

VOCAB_SIZE = 50
NEVER_EOS = VOCAB_SIZE - 1


class Harness:
    """Steps are taken with `step`; what came of each request is in `events` and `usage`."""

    def __init__(
        self,
        n_blocks: int = 64,
        block_size: int = 4,
        step_tokens: int = 32,
        max_running: int = 16,
        max_waiting: int = 64,
        max_context_tokens: int = 200,
        eos_token_ids: frozenset[int] = frozenset(),
        row_fault: Callable[[SequenceId], bool] = lambda sequence_id: False,
        groups: Sequence[Group] = (),
        disk: Callable[[KVStore], DiskCache] | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        drafts: type[DraftPolicy] = ScriptedPolicy,
        images: ImageInput | None = None,
        step_stretch: float = math.inf,
    ) -> None:
        self.pool = BlockPool(n_blocks)
        tree = RadixTree(self.pool, block_size, hashes_blocks=True)
        self.store = KVStore(self.pool, tree, block_size, groups)
        self.fault: Callable[[], None] = lambda: None
        self.runner = FakeRunner(
            self.pool, groups, block_size, VOCAB_SIZE, self._raise_fault, row_fault, images=images
        )
        self.limits = Limits(
            vocab_size=VOCAB_SIZE,
            max_context_tokens=max_context_tokens,
            arena_tokens=n_blocks * block_size,
            max_running=max_running,
            max_waiting=max_waiting,
            step_tokens=step_tokens,
            step_stretch=step_stretch,
            pools=True,
            images=images,
        )
        self.new_output = output_factory(eos_token_ids, lambda _: LetterDetokenizer())
        self.scheduler = Scheduler(
            self.store,
            self.new_output,
            self.limits,
            lambda: 7,
            Metrics(clock),
            disk=None if disk is None else disk(self.store),
            drafts=drafts(self.store),
        )
        self.events: dict[str, list[OutputEvent]] = defaultdict(list)
        self.plans: list[StepPlan] = []  # that were due
        self._ids = count()

    def _raise_fault(self) -> None:
        self.fault()

    def without_prefix_cache(self) -> "Harness":
        block_size = self.store.block_size
        self.store = KVStore(self.pool, None, block_size)
        self.scheduler = Scheduler(self.store, self.new_output, self.limits, lambda: 7, Metrics())
        return self

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        sampling: SamplingParams | None = None,
        stop: tuple[str, ...] = (),
        n: int = 1,
        client: str = "",
        priority: int = 0,
        cache_salt: str = "",
        prompt_logprobs: int | None = None,
        pooling: Pooling | None = None,
        shared_tokens: int | None = None,
        is_background: bool = False,
        pin: bool = False,
        reports_progress: bool = False,
        images: tuple[Image, ...] = (),
    ) -> str:
        request = Request(
            id=f"request-{next(self._ids)}",
            prompt=pack(prompt),
            max_tokens=max_tokens,
            sampling=sampling or SamplingParams(seed=3),
            stop=stop,
            n=n,
            client=client,
            priority=priority,
            cache_salt=cache_salt,
            prompt_logprobs=prompt_logprobs,
            pooling=pooling,
            shared_tokens=shared_tokens,
            is_background=is_background,
            pin=pin,
            reports_progress=reports_progress,
            images=images,
        )
        self.scheduler.add(self.scheduler.prepare(request))
        return request.id

    def step(self) -> StepPlan:
        """The step's plan; an empty one where nothing was due."""
        step = self.scheduler.plan()
        if step is None:
            return StepPlan()
        self.plans.append(step.plan)
        self.compute(step)
        self.take(self.scheduler.take_events())
        invariants.check(self.store)
        return step.plan

    def compute(self, step: Step) -> None:
        """Compute a step that has been planned."""
        try:
            self.runner.submit(step.plan)
            self.runner.launch()
            self.runner.draw(NO_STEP_MASKS)
            result = self.runner.collect()
        except RuntimeError as error:
            self.scheduler.failed_steps.fail(step, str(error))
        else:
            self.scheduler.commit(step, result)

    def take(self, events: list[OutputEvent]) -> None:
        for event in events:
            self.events[event.request_id].append(event)

    def finish(self) -> None:
        """Step until everybody has ended."""
        for _ in range(1000):
            if not self.scheduler.has_work:
                invariants.check_idle(self.store)
                return
            self.step()
        raise AssertionError("no end after 1000 steps")

    def serve(self, prompt: list[int], max_tokens: int = 4, **options: object) -> str:
        request_id = self.add(prompt, max_tokens, **options)  # type: ignore[arg-type]
        self.finish()
        return request_id

    def speculate(self, request_id: str, make_draft: MakeDraft) -> None:
        """Set where the drafts of the request's sequence come from. They are trusted at first."""
        self.set_drafter(self.sequence(request_id), make_draft)

    @staticmethod
    def set_drafter(sequence: LiveSequence, make_draft: MakeDraft) -> None:
        """Set where the drafts of a sequence come from."""
        sequence.proposer = Proposer(make_draft, first_rates())

    def usage(self, request_id: str, index: int = 0) -> Usage:
        usage = self.end(request_id, index).usage
        assert usage is not None
        return usage

    def end(self, request_id: str, index: int = 0) -> OutputEvent:
        ends = [e for e in self.events[request_id] if e.index == index and e.finish_reason]
        assert len(ends) == 1
        return ends[0]

    def reason(self, request_id: str, index: int = 0) -> FinishReason | None:
        return self.end(request_id, index).finish_reason

    def output(self, request_id: str, index: int = 0) -> list[int]:
        return [t for e in self.events[request_id] if e.index == index for t in e.token_ids]

    def text(self, request_id: str, index: int = 0) -> str:
        return "".join(e.text for e in self.events[request_id] if e.index == index)

    def sequence(self, request_id: str) -> LiveSequence:
        return next(s for s in self.scheduler.live if s.request.id == request_id)


def disk_of(harness: Harness) -> DiskCache:
    """The disk cache of a harness that has one."""
    assert harness.scheduler.disk is not None
    return harness.scheduler.disk


def row_tokens(plan: StepPlan) -> dict[SequenceId, int]:
    """How many tokens of each sequence the step computes, drafts included."""
    return {row.sequence_id: n_tokens(row) for row in plan.rows}


def n_tokens(row: Row) -> int:
    match row:
        case Prefill(tokens=tokens):
            return len(tokens)
        case Verify(draft=draft):
            return 1 + len(draft)
        case Decode():
            return 1
        case Resample():
            return 0


def has_draft(plan: StepPlan) -> bool:
    return any(isinstance(row, Verify) for row in plan.rows)


def prompt(start: int, n_tokens: int) -> list[int]:
    """Tokens that differ from those of any other start."""
    return [(start * 7 + i * i + i * start) % (VOCAB_SIZE - 1) for i in range(n_tokens)]
