"""Puts an engine together: backend, arena, store, scheduler, loop, thread."""

import math
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from engine.api import ModelError, Report
from engine.core.draft_model import DraftModel
from engine.core.drafting import DraftPolicy
from engine.core.inbox import Inbox
from engine.core.loop import Deliver, EngineLoop
from engine.core.metrics import Metrics
from engine.core.request import Namespaces
from engine.core.scheduler import Scheduler
from engine.core.step import Backend, Limits
from engine.disk_cache.cache import DiskCache, open_disk_cache
from engine.encoders.thread import EncoderThread
from engine.grammar.answers import MatcherAnswers, Trials
from engine.grammar.pool import GrammarPool
from engine.grammar.process import GrammarProcesses, Vocabulary
from engine.grammar.stage import GrammarStage, mask_words
from engine.images.layout import CheckpointImages
from engine.images.queue import ImageQueue
from engine.mlx_backend.backend import load_backend, load_encoder
from engine.mlx_backend.loading.locate import about_draft_model, find_checkpoint
from engine.mlx_backend.loading.purpose import Body, find_purpose
from engine.output.text import detokenizer_factory, output_factory
from engine.thread import EngineParts, EngineThread
from engine.values.model import Task
from engine.values.settings import EngineConfig
from kvstore.pool import BlockPool
from kvstore.sizes import build_groups
from kvstore.store import KVStore
from kvstore.tree import RadixTree
from kvstore.types import Namespace

if TYPE_CHECKING:  # importing zmq takes 80 ms
    from engine.kv_events.publisher import KVEventPublisher

Load: TypeAlias = Callable[[EngineConfig, Report, Inbox, Deliver], EngineParts]
"""Loads a decoder, on the thread that will run it. Its errors have a message for the user."""


def load(config: EngineConfig, report: Report, inbox: Inbox, deliver: Deliver) -> EngineParts:
    """Load the model, which must have been fetched, on the thread that will run it.

    Raises whatever loading raises, with a message for the user.
    """
    backend = load_backend(config, report)
    try:
        return assemble(backend, config, report, inbox, deliver)
    except BaseException:
        backend.release_thread()
        raise


def start(
    config: EngineConfig,
    report: Report,
    deliver: Deliver,
    ended: Callable[[], None],
    load: Load = load,
) -> EngineThread | EncoderThread:
    """Fetch the model if need be, load it, and start its engine. `ended` is called when that has
    ended. Raises whatever loading raises, with a message for the user.
    """
    checkpoint = find_checkpoint(config.model, download=True)
    if find_purpose(checkpoint, config.pooling, config.reranker).body is Body.ENCODER:
        return EncoderThread(partial(load_encoder, config, report), deliver, ended)
    if (draft_model := config.draft_model_in_use) is not None:
        with about_draft_model(draft_model):
            find_checkpoint(draft_model, download=True)
    return EngineThread(partial(load, config, report), deliver, ended)


def assemble(
    backend: Backend, config: EngineConfig, report: Report, inbox: Inbox, deliver: Deliver
) -> EngineParts:
    """Everything around a loaded backend. Belongs to the thread that loaded it."""
    pool = BlockPool(backend.sizes.n_blocks)
    groups = build_groups(backend.sizes, config.block_size, config.step_tokens)
    tree: RadixTree | None = None
    if config.prefix_cache:
        hashes_blocks = config.disk is not None or config.kv_events_config is not None
        tree = RadixTree(pool, config.block_size, time.monotonic, hashes_blocks=hashes_blocks)
    store = KVStore(pool, tree, config.block_size, groups)
    kv_events = None if tree is None else _open_publisher(config, backend, tree, inbox)
    share = config.max_prompt_share
    limits = Limits(
        vocab_size=backend.card.vocab_size,
        max_context_tokens=backend.card.max_context_tokens,
        arena_tokens=backend.card.arena_tokens,
        max_running=config.max_running,
        max_waiting=config.max_waiting,
        step_tokens=config.step_tokens,
        step_stretch=math.inf if share >= 1 else 1 / (1 - share),
        adapters=frozenset(backend.card.adapters),
        pools=backend.card.tasks != (Task.GENERATE,),
        images=backend.card.images,
    )
    new_detokenizer = detokenizer_factory(backend.hf_tokenizer)
    new_output = output_factory(backend.card.eos_token_ids, new_detokenizer)
    disk: DiskCache | None = None
    if config.disk is not None:
        disk = open_disk_cache(config.disk, backend, store, inbox.post, report)
    metrics = Metrics()
    scheduler = Scheduler(
        store,
        new_output,
        limits,
        draw_seed=partial(secrets.randbits, 63),
        metrics=metrics,
        namespaces=Namespaces(
            Namespace(model=backend.card.fingerprint, kv_format=backend.kv_format),
            backend.card.adapters,
        ),
        disk=disk,
        drafts=DraftPolicy(store, _draft_model(backend, config))
        if config.speculate == "auto"
        else None,
    )
    card = backend.card
    if kv_events is not None:
        card = replace(card, kv_events=kv_events.source)
    vocabulary = Vocabulary(backend.hf_tokenizer, card.vocab_size, card.eos_token_ids)
    processes = GrammarProcesses(vocabulary)
    grammar_pool = GrammarPool(processes, mask_words(vocabulary.size))
    answers = MatcherAnswers(grammar_pool, metrics.mask_seconds.observe)
    grammar = GrammarStage(scheduler, answers, metrics.now)
    images: ImageQueue | None = None
    if card.images is not None:
        checkpoint = Path(card.checkpoint)
        images = ImageQueue(checkpoint, CheckpointImages(checkpoint).layout())
    loop = EngineLoop(
        scheduler,
        backend.runner,
        inbox,
        deliver,
        backend.bytes,
        grammar,
        backend.rest,
        kv_events,
        backend.give_back,
    )

    return EngineParts(
        loop=loop,
        card=card,
        limits=limits,
        trials=Trials(grammar_pool),
        memory=backend.memory,
        decode=backend.decode,
        release_unused=backend.release_unused,
        release_thread=backend.release_thread,
        images=images,
        ranks=backend.ranks,
    )


def _draft_model(backend: Backend, config: EngineConfig) -> DraftModel | None:
    """The draft model as the scheduler sees it, with a store of its own; None if there is none."""
    if (draft := backend.draft) is None:
        return None
    pool = BlockPool(draft.sizes.n_blocks)
    tree = RadixTree(pool, config.block_size, time.monotonic) if config.prefix_cache else None
    groups = build_groups(draft.sizes, config.block_size, config.step_tokens)
    store = KVStore(pool, tree, config.block_size, groups)
    return DraftModel(store, draft.context_tokens, draft.cost_share)


def _open_publisher(
    config: EngineConfig, backend: Backend, tree: RadixTree, inbox: Inbox
) -> "KVEventPublisher | None":
    """The publisher of KV events, if the settings want one. Raises ModelError."""
    events = config.kv_events_config
    if events is None:
        return None
    if backend.sizes.windows or backend.sizes.states is not None:
        raise ModelError(
            "KV events are for models whose layers all have full attention: with windows or "
            "recurrent layers routers would count blocks from which nothing can be resumed; unset "
            "kv_events for this model"
        )
    from engine.kv_events.publisher import KVEventPublisher  # noqa: PLC0415 - zmq takes 80 ms

    names = {adapter: name for name, adapter in backend.card.adapters.items()}
    n_blocks = backend.sizes.n_blocks
    part = None if backend.card.images is None else backend.card.images.part_id
    return KVEventPublisher(events, tree, config.block_size, names, n_blocks, inbox.post, part)
