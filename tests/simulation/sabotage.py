"""Plausible mistakes in the scheduler, the store and the disk cache, which a simulation must find.

Each replaces one method of the real code. Mistakes that end in a crash of that code at once are not
listed: any test would find these.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

import engine.core.scheduler
from engine.core.admission import Admission
from engine.core.commit import Commit
from engine.core.loop import EngineLoop
from engine.core.pins import Pins
from engine.core.queue import WaitingQueue
from engine.core.request import Namespaces
from engine.core.rows import batch_entry
from engine.core.sequence import LiveSequence, LiveSequences, PlannedRow
from engine.core.step import BatchEntry
from engine.disk_cache.loader import DiskLoader, _Load
from engine.disk_cache.writer import DiskWriter
from engine.values.output import FinishReason
from kvstore.lease import Lease, Refusal
from kvstore.node import Match
from kvstore.ops import CopyBlock, StepOp, When
from kvstore.pool import BlockPool, blocks_for
from kvstore.recurrent import RecurrentState, RoundedState
from kvstore.slots import SlotPool
from kvstore.store import KVStore
from kvstore.tokens import TOKEN_BYTES, Tokens
from kvstore.tree import RadixTree
from kvstore.types import BlockId, Namespace


@dataclass(frozen=True, slots=True)
class Sabotage:
    """`mistake` says what goes wrong, `name` is the method of `owner` that `wrong` replaces.

    The simulation of `seed` finds it, with an error that contains `message`.
    """

    mistake: str
    owner: Any
    name: str
    wrong: Any
    seed: int
    message: str

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(self.owner, self.name, self.wrong)


_end_load = DiskLoader._end
_match = RadixTree.match
_banned_tokens = LiveSequence.banned_tokens
_namespace = Namespaces.of
_pin = KVStore.pin
_preempt = LiveSequences.preempt
_release = KVStore.release
_commit = KVStore.commit
_end_snapshot = RecurrentState.end_snapshot
_save_rounded = RoundedState._save


def _release_twice(store: KVStore, lease: Lease) -> None:
    """What others still share of the lease loses a second reference."""
    _release(store, lease)
    store._release([block for block in lease.table if store.pool.ref_count(block)])


def _free_when_evicted(pool: BlockPool, block: BlockId) -> None:
    """A block that a lease lists is free once the tree has forgotten it."""
    pool.n_changes += 1
    pool._cached[block] = 0
    pool._free_block(block)


def _write_shared(
    store: KVStore, lease: Lease, end_tokens: int
) -> Mapping[int, CopyBlock] | Refusal:
    blocks = store._allocate(max(blocks_for(end_tokens, store.block_size) - len(lease.table), 0))
    if isinstance(blocks, Refusal):
        return blocks
    lease.table.extend(blocks)
    lease.ready_tokens = len(lease.table) * store.block_size
    return {}


def _match_too_long(tree: RadixTree, namespace: Namespace, packed: bytes) -> Match:
    """Within a block, one token more than is the same."""
    match = _match(tree, namespace, packed)
    is_within = match.n_tokens % tree._block_size > 0
    has_more = match.n_tokens < len(packed) // TOKEN_BYTES
    return match._replace(n_tokens=match.n_tokens + (is_within and has_more))


def _index_planned(lease: Lease) -> int:
    """What steps in flight have yet to compute is indexed."""
    return min(lease.planned_tokens, len(lease.tokens), lease.shared_tokens)


def _restart_draws(sequence: LiveSequence) -> BatchEntry:
    """Whoever enters the batch draws as for a first token."""
    entry = batch_entry(sequence)
    return replace(entry, sampling=replace(entry.sampling, output_index=0))


def _keep_aborted(commit: Commit, sequence: LiveSequence, reason: FinishReason) -> None:
    """An aborted sequence leaves, and its lease stays."""
    vector = sequence.vector if reason is FinishReason.LENGTH else None
    pooled = b"" if vector is None else vector.astype("<f4").tobytes()
    commit._emit_end(sequence, reason, pooled=pooled)
    if reason is FinishReason.ABORT:
        commit._remove(sequence)
    else:
        commit._retire(sequence)


def _publish_whole_load(loader: DiskLoader, load: _Load) -> None:
    """A load that is cut short publishes all that it was to bring."""
    if load.n_committed:
        load.n_committed = len(load.hashes)
    _end_load(loader, load)


def _newest_first(
    queue: WaitingQueue, client: str, may_start: Callable[[LiveSequence], bool]
) -> LiveSequence | None:
    waiting = queue._clients[client].waiting if client in queue else []
    return next(filter(may_start, reversed(waiting)), None)


def _accept_one_more(
    store: KVStore, lease: Lease, n_computed: int, n_accepted: int | None = None
) -> None:
    """The KV of rejected draft tokens counts as written."""
    accepted = None if n_accepted is None else min(n_computed, n_accepted + 1)
    _commit(store, lease, n_computed, accepted)


def _round_what_is_saved(state: RoundedState, n_tokens: int, when: When, ops: list[StepOp]) -> None:
    """A state that finds no room to be saved keeps all its digits."""
    if state.group.can_save:
        _save_rounded(state, n_tokens, when, ops)


def _donate_exact(
    state: RoundedState, block: BlockId, n_tokens: int, ahead_tokens: int, ops: list[StepOp]
) -> None:
    """A sequence that ends leaves its state as it is."""
    RecurrentState.donate(state, block, n_tokens, ahead_tokens, ops)


def _keep_draft_state(state: RecurrentState, *, is_accepted: bool) -> None:
    """A state is not rolled back."""
    _end_snapshot(state, is_accepted=True)


def _publish_failed(commit: Commit, sequence: LiveSequence, message: str) -> None:
    """What a failed step was to compute goes to the cache."""
    commit._emit_end(sequence, FinishReason.ERROR, message)
    if (lease := commit._remove(sequence)) is not None:
        lease.written_tokens = min(lease.planned_tokens, len(lease.tokens))
        commit._store.donate(lease)


def _forget_served(queue: WaitingQueue) -> None:
    """Clients that had a turn stay before the others."""
    queue._served.clear()


def _without_adapter(namespaces: Namespaces, cache_salt: str, adapter: str) -> Namespace:
    return _namespace(namespaces, cache_salt, "")


def _without_salt(namespaces: Namespaces, cache_salt: str, adapter: str) -> Namespace:
    return _namespace(namespaces, "", adapter)


def _clear_uncounted(pins: Pins, namespace: Namespace | None) -> None:
    """Pins that are cleared still count."""
    for key in [key for key in pins._leases if namespace in {None, key[0]}]:
        pins._release(pins._leases.pop(key))


def _pin_loosely(store: KVStore, namespace: Namespace, tokens: Tokens) -> Lease | None:
    """A pin holds no reference to its blocks."""
    lease = _pin(store, namespace, tokens)
    if lease is not None:
        store._release(lease.table)
    return lease


def _keep_pooled(sequences: LiveSequences, sequence: LiveSequence) -> Lease:
    """A preempted sequence adds the hidden states of its prompt to those from before."""
    pooled = sequence.pooled
    lease = _preempt(sequences, sequence)
    sequence.pooled = pooled
    return lease


def _ban_along_draft(sequence: LiveSequence, n_draft: int = 0) -> tuple[int, ...]:
    """The tokens of a draft do not count for `min_tokens`."""
    return _banned_tokens(sequence)


def _of_any_lease(planned: PlannedRow) -> bool:
    """A result counts if its sequence has a lease, whichever."""
    return planned.sequence.lease is not None


def _keep_cached(loop: EngineLoop) -> None:
    """What was cached is found after the storage was lost."""
    loop.scheduler.failed_steps.recompute_all()


def _nothing(*args: object) -> None:
    """What is to be done is left out."""


SABOTAGES: Sequence[Sabotage] = (
    Sabotage(
        "first come is first served",
        WaitingQueue,
        "begin_step",
        _forget_served,
        580,
        "for its turn",
    ),
    Sabotage(
        "nobody is preempted for another client",
        Admission,
        "victim",
        _nothing,
        676,
        "steps for its turn",
    ),
    Sabotage(
        "the newest of a client's sequences is first",
        WaitingQueue,
        "next",
        _newest_first,
        577,
        "a client's own overtook",
    ),
    Sabotage(
        "shared blocks are released twice",
        KVStore,
        "release",
        _release_twice,
        36,
        "0 references, 2 tables list it",
    ),
    Sabotage(
        "an evicted block is free while leases list it",
        BlockPool,
        "uncache",
        _free_when_evicted,
        578,
        "are free and referred to",
    ),
    Sabotage(
        "copy-on-write is left out",
        KVStore,
        "_ensure_private",
        _write_shared,
        582,
        "is written and shared",
    ),
    Sabotage(
        "a match is one token too long",
        RadixTree,
        "match",
        _match_too_long,
        588,
        "cached, and not there",
    ),
    Sabotage(
        "tokens that are only planned are indexed",
        Lease,
        "indexable_tokens",
        property(_index_planned),
        578,
        "is to be written, and has 2 references",
    ),
    Sabotage(
        "a freed block keeps its slot of a window",
        SlotPool,
        "forget",
        _nothing,
        587,
        "another's window is attached",
    ),
    Sabotage(
        "a preempted sequence draws as for its first token",
        engine.core.scheduler,
        "batch_entry",
        _restart_draws,
        578,
        "other tokens than when alone",
    ),
    Sabotage(
        "an aborted sequence keeps its lease",
        Commit,
        "end",
        _keep_aborted,
        578,
        "the leases are not those of who runs",
    ),
    Sabotage(
        "a load that is cut short publishes all of it",
        DiskLoader,
        "_end",
        _publish_whole_load,
        634,
        "a block of other tokens",
    ),
    Sabotage(
        "a rejected draft token counts as written",
        KVStore,
        "commit",
        _accept_one_more,
        7,
        "a block of other tokens",
    ),
    Sabotage(
        "a state is not rolled back after a rejected draft",
        RecurrentState,
        "end_snapshot",
        _keep_draft_state,
        639,
        "the state of another prefix",
    ),
    Sabotage(
        "what a failed step computed is published",
        Commit,
        "fail",
        _publish_failed,
        580,
        "a block of other tokens",
    ),
    Sabotage(
        "a prefix is shared among adapters",
        Namespaces,
        "of",
        _without_adapter,
        578,
        "a block of other tokens",
    ),
    Sabotage(
        "a prefix is shared among salts",
        Namespaces,
        "of",
        _without_salt,
        587,
        "by no sequence of the same namespace",
    ),
    Sabotage(
        "what is read during a clear is written all the same",
        DiskWriter,
        "drop_reads",
        _nothing,
        578,
        "on its way to the disk",
    ),
    Sabotage(
        "a clear leaves pinned prefixes pinned",
        Pins,
        "clear",
        _nothing,
        588,
        "still pinned",
    ),
    Sabotage(
        "a prefix that is no longer pinned still counts",
        Pins,
        "clear",
        _clear_uncounted,
        588,
        "pinned blocks are miscounted",
    ),
    Sabotage(
        "a pin does not hold its blocks",
        KVStore,
        "pin",
        _pin_loosely,
        588,
        "references",
    ),
    Sabotage(
        "a preempted prompt is pooled twice",
        LiveSequences,
        "preempt",
        _keep_pooled,
        648,
        "another vector than when alone",
    ),
    Sabotage(
        "stop tokens stay banned along a draft that goes beyond min_tokens",
        LiveSequence,
        "banned_tokens",
        _ban_along_draft,
        778,
        "other tokens than when alone",
    ),
    Sabotage(
        "a state is rounded only where it is saved",
        RoundedState,
        "_save",
        _round_what_is_saved,
        4,
        "a state was rounded elsewhere",
    ),
    Sabotage(
        "a state is saved that was not rounded",
        RoundedState,
        "donate",
        _donate_exact,
        1,
        "a state that was not rounded is attached",
    ),
    Sabotage(
        "a state that a failed step was to roll back stays in the cache",
        KVStore,
        "revoke",
        _nothing,
        597,
        "another's state is attached",
    ),
    Sabotage(
        "what a failed step was to load is still awaited",
        DiskLoader,
        "fail",
        _nothing,
        578,
        "awaits a step that is over",
    ),
    Sabotage(
        "what was cached before the storage was lost is found",
        EngineLoop,
        "_lose_storage",
        _keep_cached,
        596,
        "KV of another prefix|another's state is attached",
    ),
    Sabotage(
        "the result of an earlier lease counts",
        PlannedRow,
        "is_current",
        property(_of_any_lease),
        2983,
        "is to be written, and has 2 references",
    ),
    Sabotage(
        "what a failed step was to load is published",
        DiskLoader,
        "fail",
        DiskLoader.commit,
        578,
        "a block of other tokens",
    ),
)
