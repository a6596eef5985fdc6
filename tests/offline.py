"""The engine without threads or HTTP: a checkpoint's model under the real scheduler and store."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from engine.core.draft_model import DraftModel
from engine.core.drafting import DraftPolicy
from engine.core.inbox import Inbox
from engine.core.loop import EngineLoop
from engine.core.metrics import Metrics
from engine.core.request import Namespaces
from engine.core.scheduler import Scheduler
from engine.core.step import GiveBack, Limits, ModelRunner, Vector
from engine.disk_cache.cache import DiskCache
from engine.drafts.proposer import MakeDraft, Proposer, first_rates
from engine.grammar.answers import MatcherAnswers
from engine.grammar.stage import GrammarStage
from engine.grammar.state import GrammarPlan
from engine.mlx_backend.attentions import UNSTATED_TOKENS, attentions
from engine.mlx_backend.decode.choice import DecodePath
from engine.mlx_backend.draft_runner import DraftRunner
from engine.mlx_backend.kv.layout import Layout
from engine.mlx_backend.kv.storage import Storage
from engine.mlx_backend.loading.images import image_input
from engine.mlx_backend.loading.loader import LoadedModel, load_weights, open_model
from engine.mlx_backend.model.attention import Attention
from engine.mlx_backend.model.cached_model import CachedModel, Execution
from engine.mlx_backend.runner import Launch, MlxRunner
from engine.mlx_backend.sampling.sampler import Sampler
from engine.mlx_backend.vision.tower import ImageEncoder
from engine.output.text import NewOutput, detokenizer_factory, output_factory
from engine.values.images import ImageInput
from engine.values.output import FinishReason, OutputEvent, TokenLogprob, Usage
from engine.values.request import Request
from engine.values.settings import AdapterConfig, KVFormat, StateFormat
from kvstore import invariants
from kvstore.pool import BlockPool
from kvstore.sizes import StateCounts, StorageBytes, StorageSizes, WindowSize, build_groups
from kvstore.store import KVStore
from kvstore.tree import RadixTree
from kvstore.window import lease_slots
from tests.devices import SERVING_LAUNCH
from tests.grammars import NoAnswers
from tests.simulation.daemon import LetterDetokenizer
from tests.unit.scripted_drafter import ScriptedPolicy

DRAFT_COST = 0.1
"""What a forward of a draft model takes of one of the model, for a clock that stands still."""


@dataclass(frozen=True, slots=True)
class Served:
    """A checkpoint's model as the daemon loads it, and how its rows share forwards."""

    loaded: LoadedModel
    execution: Execution

    @property
    def layout(self) -> Layout:
        return self.loaded.layout

    @property
    def images(self) -> ImageInput | None:
        """What it takes of images."""
        if self.loaded.vision is None or self.execution.images is None:
            return None
        return image_input(self.loaded.vision, 1 << 30, UNSTATED_TOKENS)

    @property
    def encoder(self) -> ImageEncoder | None:
        """Encodes its images."""
        return None if self.loaded.vision is None else self.loaded.vision.encoder


def load(
    checkpoint: Path,
    memory_bytes: int = 1 << 30,
    adapters: Sequence[AdapterConfig] = (),
    kv_format: KVFormat = KVFormat.AUTO,
    state_format: StateFormat = StateFormat.AUTO,
) -> Served:
    """Raises ModelError, as the daemon does, when the model cannot be served."""
    loaded = open_model(
        checkpoint,
        memory_bytes,
        adapter_configs=adapters,
        kv_format=kv_format,
        state_format=state_format,
    )
    execution = load_weights(loaded, attentions("auto", loaded), lambda line: None)
    return Served(loaded, execution)


@dataclass(frozen=True, slots=True)
class Room:
    """What an engine is given. Every group has room for `max_running` sequences and `spare` more.

    A spare is the window of a sequence that has ended, or a saved state.
    """

    n_blocks: int
    block_size: int = 8
    max_running: int = 8
    step_tokens: int = 32
    spare: int = 24
    first_blocks: int | None = None  # for which memory is taken at first; None: all
    rounded_every: int = 16  # tokens, where states are saved in less precision

    def sizes(self, layout: Layout) -> StorageSizes:
        return StorageSizes(
            self.n_blocks,
            tuple(
                WindowSize(window, (self.max_running + self.spare) * self._lease_slots(window))
                for window in layout.windows
            ),
            StateCounts(
                self.max_running, self.spare, self.rounded_every if layout.rounds_states else None
            )
            if layout.states
            else None,
        )

    def _lease_slots(self, window: int) -> int:
        return lease_slots(window, self.block_size, self.step_tokens)


def cached_model(served: Served, attention: Attention, room: Room) -> CachedModel:
    """The model over storage of its own."""
    layout = served.layout.in_blocks_of(room.block_size)
    storage = Storage(layout, room.sizes(layout), room.block_size, room.first_blocks)
    execution = replace(served.execution, attention=attention)
    return CachedModel(served.loaded.model, layout, storage, execution)


def new_store(served: Served, room: Room, pool: BlockPool, hashes_blocks: bool = False) -> KVStore:
    """A store with the model's groups, sharing prefixes. A disk cache needs the blocks' hashes."""
    layout = served.layout.in_blocks_of(room.block_size)
    groups = build_groups(room.sizes(layout), room.block_size, room.step_tokens)
    tree = RadixTree(pool, room.block_size, hashes_blocks=hashes_blocks)
    return KVStore(pool, tree, room.block_size, groups)


ChooseDecode: TypeAlias = Callable[[CachedModel], DecodePath]
"""Says how a model's steady decodes are computed."""


def write_letters(served: Served) -> NewOutput:
    """Outputs of random models, which no token ends: a letter for each token."""
    return output_factory(frozenset(), lambda _: LetterDetokenizer())


def write_text(served: Served) -> NewOutput:
    """Outputs as the daemon makes them: the tokenizer's text, up to an end token of the model."""
    loaded = served.loaded
    return output_factory(loaded.eos_token_ids, detokenizer_factory(loaded.tokenizer._tokenizer))


class OfflineDaemon:
    """Requests in, all their tokens out, with the store recounted after every step."""

    def __init__(
        self,
        served: Served,
        attention: Attention,
        room: Room,
        watch: Callable[[ModelRunner], ModelRunner] = lambda runner: runner,
        disk: Callable[[KVStore, Storage], DiskCache] | None = None,
        answers: Callable[[int], MatcherAnswers] = NoAnswers,
        clock: Callable[[], float] = time.monotonic,
        launch: Launch = SERVING_LAUNCH,
        inbox: Inbox | None = None,
        decode: ChooseDecode | None = None,
        drafts: Callable[[KVStore], DraftPolicy] = ScriptedPolicy,
        write: Callable[[Served], NewOutput] = write_letters,
        max_waiting: int = 64,
        draft: tuple[Served, Room] | None = None,
    ) -> None:
        """`answers` is given the size of the vocabulary. A disk's readers post to the `inbox`.
        `draft`: a draft model, which decodes in the same way, and its room.

        `decode` chooses how steady decodes are computed; None: eagerly. `drafts` decides which
        drafts are verified, and `write` makes the text of outputs.
        """
        vocab_size = served.layout.vocab_size
        model = cached_model(served, attention, room)
        path = None if decode is None else decode(model)
        draft_runner: DraftRunner | None = None
        self.draft_store: KVStore | None = None
        policy = drafts
        if draft is not None:
            of_draft, draft_room = draft
            draft_model = cached_model(of_draft, Attention(), draft_room)
            draft_path = None if decode is None else decode(draft_model)
            draft_runner = DraftRunner(draft_model, Sampler(vocab_size), vocab_size, draft_path)
            own = new_store(of_draft, draft_room, BlockPool(draft_room.n_blocks))
            self.draft_store = own
            context_tokens = of_draft.loaded.max_context_tokens or UNSTATED_TOKENS

            def policy(store: KVStore) -> DraftPolicy:
                return DraftPolicy(store, DraftModel(own, context_tokens, DRAFT_COST))

        runner = MlxRunner(
            model,
            Sampler(vocab_size),
            launch,
            decode=path,
            draft=draft_runner,
            encoder=served.encoder,
        )

        self.runner = watch(runner)
        self.storage = model.storage
        self.store = new_store(served, room, BlockPool(room.n_blocks), disk is not None)
        self._limits = Limits(
            vocab_size,
            served.loaded.max_context_tokens or UNSTATED_TOKENS,
            room.n_blocks * room.block_size,
            room.max_running,
            max_waiting,
            room.step_tokens,
            adapters=frozenset(served.loaded.adapters),
            pools=True,
            images=served.images,
        )
        self.scheduler = Scheduler(
            self.store,
            write(served),
            self._limits,
            draw_seed=lambda: 0,
            metrics=Metrics(clock),
            namespaces=Namespaces(fingerprints=served.loaded.adapters),
            disk=None if disk is None else disk(self.store, model.storage),
            drafts=policy(self.store),
        )
        self._events: list[OutputEvent] = []
        self.loop = EngineLoop(
            self.scheduler,
            self.runner,
            inbox or Inbox(),
            self._deliver,
            StorageBytes(block=0, slots=(0,) * len(self.store.groups), arenas=0),
            GrammarStage(self.scheduler, answers(vocab_size), self.scheduler.metrics.now),
            runner.resize_ahead,
            give_back=GiveBack(self.storage.shrink, runner.give_back),
        )
        self.usage: dict[str, Usage] = {}
        self.logprobs = defaultdict[tuple[str, int], list[TokenLogprob]](list)
        self.texts = defaultdict[tuple[str, int], str](str)
        self.reasons: dict[tuple[str, int], FinishReason] = {}
        self.prompt_logprobs = defaultdict[str, list[TokenLogprob | None]](list)
        self.vectors: dict[str, Vector] = {}

    def serve(self, *requests: Request) -> Mapping[tuple[str, int], Sequence[int]]:
        """Tokens by request id and index, all requests at once."""
        said = defaultdict[tuple[str, int], list[int]](list)
        for request in requests:
            self.add(request)
        return self.rest(said)

    def rest(
        self, said: defaultdict[tuple[str, int], list[int]]
    ) -> Mapping[tuple[str, int], Sequence[int]]:
        """The same of what has been added."""
        while not self.loop.is_idle:
            self._step(said)
        return said

    def add(self, request: Request, plan: GrammarPlan | None = None) -> None:
        self.scheduler.add(self.scheduler.prepare(request, plan))

    def speculate(self, request_id: str, *drafters: MakeDraft) -> None:
        """Set where the drafts of a waiting request's sequences come from, one for each."""
        sequences = [s for s in self.scheduler.waiting if s.request.id == request_id]
        for sequence, make_draft in zip(sequences, drafters, strict=True):
            sequence.proposer = Proposer(make_draft, first_rates())

    def step(
        self, n_steps: int, said: defaultdict[tuple[str, int], list[int]] | None = None
    ) -> None:
        """Compute `n_steps` steps of what has been added. Their tokens are added to `said`."""
        for _ in range(n_steps):
            self._step(defaultdict(list) if said is None else said)

    def turn(self) -> list[OutputEvent]:
        """Take a turn of the loop: one more step is submitted, and the one before is collected."""
        if not self.loop.is_idle:
            self.loop.turn()
        events, self._events = self._events, []
        return events

    def _deliver(self, events: list[OutputEvent]) -> None:
        self._events += events

    def _step(self, said: dict[tuple[str, int], list[int]]) -> None:
        for event in self.turn():
            assert event.error is None
            said[event.request_id, event.index] += event.token_ids
            self.logprobs[event.request_id, event.index] += event.logprobs
            self.texts[event.request_id, event.index] += event.text
            self.prompt_logprobs[event.request_id] += event.prompt_logprobs
            if event.finish_reason is not None:
                self.reasons[event.request_id, event.index] = event.finish_reason
            if event.pooled:
                self.vectors[event.request_id] = np.frombuffer(event.pooled, "<f4")
            if event.usage and event.index == 0:
                self.usage[event.request_id] = event.usage
        invariants.check(self.store)
        if self.draft_store is not None:
            invariants.check(self.draft_store)
