"""The KV store: hands sequences the blocks they need and shares equal prefixes among them.

probe    count what is cached of a prompt          changes nothing
restore  room for KV that is filled in from disk   a Lease that no step computes, or a Refusal
admit    adopt what is cached, allocate the rest   a Lease, or a Refusal and no change
extend   plan the next tokens, and room for them   StepOps, or a Refusal
publish  these tokens' KV has been written         whole blocks are indexed, visible to all
rewind   other tokens follow than were planned     these are to be planned again
donate   the sequence has ended                    its blocks go to the index
release  the same                                  its references are dropped

A prefix is a hit only where every group (see kvstore/groups/) can resume, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvstore.lease import Lease, Refusal
from kvstore.ops import NO_OPS, CopyBlock, StepOps, StorageOp
from kvstore.pool import BlockPool, BlockTable, blocks_for
from kvstore.slots import NEVER, Group, Groups
from kvstore.tokens import Tokens
from kvstore.tree import Match, PrefixIndex
from kvstore.types import BlockId, Namespace


@dataclass(slots=True)
class StoreCounters:
    """Counted since start; they only grow."""

    evictions: int = 0
    prefix_copies: int = 0  # of a partly adopted block, before the lease that adopted it wrote
    fork_copies: int = 0  # of the last block of a prompt with several outputs
    tail_hit_tokens: int = 0  # adopted beyond whole blocks


class BlockSupply:
    """Blocks of `pool`, of which `index` evicts those that are in no table."""

    def __init__(self, pool: BlockPool, index: PrefixIndex, counters: StoreCounters) -> None:
        self._pool = pool
        self._index = index
        self._counters = counters

    @property
    def available(self) -> int:
        """Blocks that could be handed out now, if need be by eviction."""
        return self._pool.n_free + self._pool.n_evictable

    def available_beside(self, adopted: Sequence[BlockId]) -> int:
        """The same when these, which are indexed, have been adopted."""
        return self.available - sum(self._pool.ref_count(block) == 0 for block in adopted)

    def take(self, n_blocks: int) -> list[BlockId] | Refusal:
        """Free blocks, evicting as many as it takes."""
        if n_blocks > self.available:
            return Refusal(n_blocks, self.available)
        while self._pool.n_free < n_blocks:
            if self._index.evict() is None:  # below what is evictable a table has a block
                return Refusal(n_blocks, self._pool.n_free)
            self._counters.evictions += 1
        return self._pool.allocate(n_blocks)

    def take_behind(
        self, adopted: Sequence[BlockId], n_blocks: int
    ) -> tuple[BlockId, ...] | Refusal:
        """Retain `adopted` and take more blocks to follow them, or leave everything as it was."""
        self._pool.retain(adopted)  # before anything is evicted, lest it be these
        fresh = self.take(n_blocks)
        if isinstance(fresh, Refusal):
            self.release(adopted)
            return fresh
        return (*adopted, *fresh)

    def release(self, blocks: Sequence[BlockId]) -> None:
        """One table less lists them; what only the index has now can be evicted."""
        self._index.offer(self._pool.release(blocks))


class Publication:
    """Inserts behind what is already indexed of a lease: a block costs the same at any depth."""

    def __init__(
        self, pool: BlockPool, index: PrefixIndex, supply: BlockSupply, groups: Groups
    ) -> None:
        self._pool = pool
        self._index = index
        self._supply = supply
        self._groups = groups

    def insert(self, lease: Lease, n_tokens: int) -> None:
        """Index the blocks of the lease's first `n_tokens` tokens. Where blocks with the same
        tokens are indexed already the table lists these from now on.
        """
        block_size, first = lease.table.block_size, lease.indexed_blocks
        above = self._indexed(lease, first - 1)
        if above is None:
            first = 0
        packed = lease.tokens.packed(first * block_size, n_tokens)
        blocks = lease.table[first : blocks_for(n_tokens, block_size)]
        lease.indexed_blocks = n_tokens // block_size
        if above is None:
            equal = self._index.insert(lease.namespace, packed, blocks)
        else:
            equal = self._index.insert_behind(above, packed, blocks)
        for entry, block in enumerate(equal, first):
            if lease.table[entry] != block:
                self._repoint(lease, entry, block)

    def attach_at_end(self, lease: Lease) -> BlockId | None:
        """Attach what is attached to the lease's own last block to the indexed block that begins
        with the same tokens, as far as they are written. Returns that block, or None.

        It may be another lease's block, with other tokens behind these.
        """
        index, before = divmod(lease.written_tokens - 1, lease.table.block_size)
        indexed, own = self._find_end(lease, index), lease.table[index]
        if indexed is not None and own != indexed:
            self._groups.copy(own, indexed, before + 1)
        return indexed

    def _find_end(self, lease: Lease, index: int) -> BlockId | None:
        written_tokens = lease.written_tokens
        above = self._indexed(lease, index - 1)
        if above is not None:
            packed = lease.tokens.packed(index * lease.table.block_size, written_tokens)
            return self._index.find_behind(above, packed)
        match = self._index.match(lease.namespace, lease.tokens.packed(0, written_tokens))
        return match.blocks[-1] if match.n_tokens == written_tokens else None

    def _indexed(self, lease: Lease, entry: int) -> BlockId | None:
        """The block of that entry of the table, if there is one and the index has all of it: it may
        have been cleared since, and then have got a part of the block from a fork of the lease.
        """
        if entry < 0 or not self._index.has_whole(block := lease.table[entry]):
            return None
        return block

    def _repoint(self, lease: Lease, entry: int, block: BlockId) -> None:
        self._groups.repoint(lease.table[entry], block)
        self._pool.retain((block,))
        self._supply.release((lease.table.repoint(entry, block),))
        lease.is_patched = True


class WritableBlocks:
    """Replaces what others refer to by copies, and allocates what is missing."""

    def __init__(
        self,
        pool: BlockPool,
        supply: BlockSupply,
        groups: Groups,
        counters: StoreCounters,
        block_size: int,
    ) -> None:
        self._pool = pool
        self._supply = supply
        self._groups = groups
        self._counters = counters
        self._block_size = block_size

    def extend(self, lease: Lease, end_tokens: int) -> Sequence[CopyBlock] | Refusal:
        """Blocks of the lease's own for what it has not written, up to `end_tokens`."""
        first = lease.planned_tokens // self._block_size
        end = blocks_for(end_tokens, self._block_size)
        reached = range(first, min(end, len(lease.table)))
        shared = [i for i in reached if self._pool.total_refs(lease.table[i]) > 1]
        blocks = self._supply.take(len(shared) + max(end - len(lease.table), 0))
        if isinstance(blocks, Refusal):
            return blocks
        lease.table.append(blocks[len(shared) :])
        lease.ready_tokens = end * self._block_size
        copies = []
        for i, target in zip(shared, blocks, strict=False):
            source = lease.table.repoint(i, target)
            copied_tokens = max(lease.planned_tokens - i * self._block_size, 0)
            copies.append(CopyBlock(source, target, copied_tokens))
            self._groups.copy(source, target, copied_tokens)
        if lease.is_fork or lease.planned_tokens > lease.cached_tokens:  # it has written there
            self._counters.fork_copies += len(copies)
        else:
            self._counters.prefix_copies += len(copies)
        return copies


class KVStore:
    """Leases of `pool`'s blocks, shared through `index`. Belongs to the engine thread."""

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex,
        block_size: int,
        groups: Sequence[Group] = (),
    ) -> None:
        self._pool = pool
        self._index = index
        self._block_size = block_size
        self._groups = Groups(groups)
        for group in groups:
            pool.when_freed(group.forget)
        self.rewinds: Final = all(group.rewinds for group in groups)
        """Whether no lease is ever tentative."""
        self._leases: set[Lease] = set()
        self.in_flight = index.in_flight(self.probe, self.checkpoint)
        self.counters = StoreCounters()
        self._supply = BlockSupply(pool, index, self.counters)
        self._published = Publication(pool, index, self._supply, self._groups)
        self._writable = WritableBlocks(pool, self._supply, self._groups, self.counters, block_size)

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._block_size

    @property
    def pool(self) -> BlockPool:
        return self._pool

    @property
    def index(self) -> PrefixIndex:
        return self._index

    @property
    def groups(self) -> tuple[Group, ...]:
        return self._groups.all

    @property
    def leases(self) -> frozenset[Lease]:
        """The leases that have not been released."""
        return frozenset(self._leases)

    @property
    def available_blocks(self) -> int:
        """Blocks that could be handed out now, if need be by eviction."""
        return self._supply.available

    def probe(self, namespace: Namespace, tokens: Tokens) -> int:
        """How many tokens of a prompt `admit` would adopt now. Changes nothing, not recency."""
        return self._resumable(self._match(namespace, tokens)).n_tokens

    def continuation(self, namespace: Namespace, tokens: Tokens, most: int) -> tuple[int, ...]:
        """Up to `most` tokens that are cached behind all of `tokens`; of several runs the one used
        last. Changes nothing, not recency.
        """
        return self._index.continuation(namespace, tokens.packed(0, len(tokens)), most)

    def admit(
        self,
        namespace: Namespace,
        tokens: Tokens,
        reserve_tokens: int = 0,
        spare_blocks: int = 0,
        shared_tokens: int = NEVER,
    ) -> Lease | Refusal:
        """Adopt the longest indexed prefix and allocate blocks for the rest, all or nothing.

        The last token of a prompt is never adopted: one must be computed to get logits. There is
        room for `reserve_tokens` behind the prompt, and `spare_blocks` remain available to others.
        Of what the lease computes the index gets the whole blocks of the first `shared_tokens`
        tokens at most.
        """
        found = self._match(namespace, tokens)
        missing = self._groups.unresumable(found.blocks, found.n_tokens)
        match = self._until(found, found.n_tokens - sum(missing))
        lease = self._admit(namespace, tokens, match, reserve_tokens, spare_blocks, shared_tokens)
        while isinstance(lease, Refusal) and (tail_tokens := match.n_tokens % self._block_size):
            # Its copy may need the very block that it stands in: do without what matched of that.
            match = self._resumable(match.until(match.n_tokens - tail_tokens, self._block_size))
            lease = self._admit(
                namespace, tokens, match, reserve_tokens, spare_blocks, shared_tokens
            )
        if isinstance(lease, Lease):
            self._index.touch(match)
            self._groups.count_unresumable(missing)
            self.counters.tail_hit_tokens += match.n_tokens % self._block_size
            if found.n_tokens - match.n_tokens >= self._block_size:  # less is not worth a step
                self.checkpoint(lease, found.n_tokens)  # here the next one will want to resume
        return lease

    def admit_cold(
        self,
        namespace: Namespace,
        tokens: Tokens,
        reserve_tokens: int = 0,
        spare_blocks: int = 0,
        shared_tokens: int = NEVER,
    ) -> Lease | Refusal:
        """The same, adopting nothing: for a prompt of which every token must be computed."""
        nothing = Match(0, (), ())
        return self._admit(namespace, tokens, nothing, reserve_tokens, spare_blocks, shared_tokens)

    def restore(
        self, namespace: Namespace, tokens: Tokens, have_tokens: int, spare_blocks: int = 0
    ) -> Lease | Refusal:
        """A lease for KV that no step computes: it is filled in, published and donated.

        It adopts the whole blocks that are indexed and counts as written what fills blocks of
        `have_tokens`. No sequence resumes from it, so it has no group states.
        """
        match = self._index.match(namespace, tokens.packed(0, len(tokens)))
        adopted = match.blocks[: match.n_tokens // self._block_size]
        fresh = blocks_for(len(tokens), self._block_size) - len(adopted)
        if fresh + spare_blocks > (available := self._supply.available_beside(adopted)):
            return Refusal(fresh + spare_blocks, available)
        blocks = self._supply.take_behind(adopted, fresh)
        if isinstance(blocks, Refusal):
            return blocks
        whole = min(have_tokens // self._block_size, len(adopted))
        table = BlockTable(self._block_size, blocks)
        return self._begin(Lease.adopting(namespace, tokens, table, whole * self._block_size))

    def fork(
        self,
        lease: Lease,
        tokens: Tokens,
        n_tokens: int,
        reserve_tokens: int = 0,
        spare_blocks: int = 0,
    ) -> Lease | Refusal:
        """A second lease of the first `n_tokens` positions that `lease` has written.

        `tokens` begin with the same `n_tokens` tokens. Nothing is copied before somebody writes.
        Where a group cannot resume there, the second lease begins with fewer. `reserve_tokens` and
        `spare_blocks` are as in `admit`.
        Raises ValueError for positions that have not been written.
        """
        if n_tokens > lease.written_tokens:
            raise ValueError(f"{n_tokens} tokens to fork, {lease.written_tokens} written")
        n_tokens = self._groups.resume_point(lease.table, n_tokens)
        shared = tuple(lease.table[: blocks_for(n_tokens, self._block_size)])
        fresh_blocks = blocks_for(len(tokens) + reserve_tokens, self._block_size) - len(shared)
        needed = fresh_blocks + (1 if n_tokens % self._block_size else 0) + spare_blocks
        if needed > self.available_blocks:
            return Refusal(needed, self.available_blocks)
        lease.ready_tokens = 0  # the last block that it has begun is shared now
        forked = self._lease(lease.namespace, tokens, shared, n_tokens, fresh_blocks)
        if isinstance(forked, Lease):
            forked.is_fork = True
        return forked

    def max_step_tokens(self, lease: Lease, n_tokens: int, last_position: int = 0) -> int:
        """See Lease.max_step_tokens."""
        return lease.max_step_tokens(n_tokens, last_position)

    def checkpoint(self, lease: Lease, n_tokens: int) -> None:
        """See Lease.checkpoint."""
        lease.checkpoint(n_tokens)

    def extend(self, lease: Lease, n_tokens: int, last_position: int = 0) -> StepOps | Refusal:
        """Plan the next `n_tokens` (at least one) positions and make them writable, or nothing.

        Blocks are copied on write: one that others refer to is replaced by a copy. The ops are for
        the next step; those that admissions have left are among them.
        `last_position`: see `max_step_tokens`.
        """
        end_tokens = lease.planned_tokens + n_tokens
        if end_tokens <= lease.ready_tokens:
            lease.planned_tokens = end_tokens
            return NO_OPS
        copies = self._writable.extend(lease, end_tokens)
        if isinstance(copies, Refusal):
            return copies
        step_ops = lease.plan(end_tokens, last_position, copies, self.take_ops())
        self._supply.release([copy.source for copy in copies])
        return step_ops

    def extend_by_draft(self, lease: Lease, n_tokens: int) -> StepOps | Refusal:
        """The same for tokens behind the step's last that may turn out to be others.

        The lease is `tentative` where that is all or nothing: then nothing of the step is published
        before it is known that all are right. Otherwise it is rewound, or ends.
        """
        if (kept := lease.keep_back(n_tokens)) is None:
            return Refusal(needed_blocks=1, available_blocks=0)
        step_ops = self.extend(lease, n_tokens)
        if isinstance(step_ops, Refusal):
            lease.go_on()
            return step_ops
        if not kept:
            return step_ops
        # Last: what is kept goes to a slot that a lease which has ended may still roll back.
        return replace(step_ops, before=(*step_ops.before, *self.take_ops(), *kept))

    def take_ops(self) -> list[StorageOp]:
        """The ops for the next step that `extend` has not handed out."""
        return self._groups.take_ops()

    def revoke(self, ops: Sequence[StorageOp]) -> None:
        """These ops were not, or perhaps not, executed: cache nothing that rests on them."""
        self._groups.revoke(ops)

    def publish(self, lease: Lease, n_tokens: int) -> None:
        """The KV of the lease's first `n_tokens` tokens has been written: index whole blocks.

        Where an equal block is indexed already the table is repointed to it.
        """
        if lease.is_tentative:
            lease.go_on()
        published = lease.indexable_tokens // self._block_size
        lease.written_tokens = n_tokens
        lease.planned_tokens = max(lease.planned_tokens, n_tokens)  # of what no step computes
        if n_tokens < lease.due_tokens:
            return
        if (whole := lease.indexable_tokens // self._block_size) > published:
            self._published.insert(lease, whole * self._block_size)
        if lease.advance(n_tokens):
            self._published.attach_at_end(lease)

    def rewind(self, lease: Lease) -> None:
        """What has been planned behind the tokens that it has written is to be planned again: other
        tokens than were thought stand there.
        """
        lease.go_back()

    def donate(self, lease: Lease) -> None:
        """Release the lease, leaving what it has written to the index, the tail too; of tokens that
        are not all to be shared, whole blocks.

        Raises ValueError when the lease has been released before.
        """
        if lease.is_tentative:
            self.rewind(lease)
        if lease in self._leases and (n_tokens := lease.indexable_tokens):
            self._published.insert(lease, n_tokens)
            if self.groups and (block := self._published.attach_at_end(lease)) is not None:
                last_tokens = (lease.written_tokens - 1) % self._block_size + 1
                ahead_tokens = lease.planned_tokens - lease.written_tokens
                self._groups.donate(lease.group_states, block, last_tokens, ahead_tokens)
        self.release(lease)

    def release(self, lease: Lease) -> None:
        """Drop the lease's references. Raises ValueError when that has been done before."""
        if lease not in self._leases:
            raise ValueError("the lease has been released before")
        self._leases.remove(lease)
        self.in_flight.end(lease)
        for state in lease.group_states:
            state.release()
        self._supply.release(lease.table[:])

    def clear(self, namespace: Namespace | None = None) -> int:
        """Forget the index of one namespace, or all. Returns how many blocks became free.

        Blocks that live sequences hold stay theirs, and are indexed again with the next whole
        block that these publish.
        """
        return self._index.clear(namespace)

    def _match(self, namespace: Namespace, tokens: Tokens) -> Match:
        return self._index.match(namespace, tokens.packed(0, len(tokens) - 1))

    def _resumable(self, match: Match) -> Match:
        """As much of the match as all groups can go on from."""
        return self._until(match, self._groups.resume_point(match.blocks, match.n_tokens))

    def _until(self, match: Match, n_tokens: int) -> Match:
        return match if n_tokens == match.n_tokens else match.until(n_tokens, self._block_size)

    def _admit(
        self,
        namespace: Namespace,
        tokens: Tokens,
        match: Match,
        reserve_tokens: int,
        spare_blocks: int,
        shared_tokens: int,
    ) -> Lease | Refusal:
        table_blocks = blocks_for(len(tokens) + reserve_tokens, self._block_size)
        fresh_blocks = table_blocks - len(match.blocks)
        copied_blocks = 1 if match.n_tokens % self._block_size else 0
        needed = fresh_blocks + copied_blocks + spare_blocks
        if needed > (available := self._supply.available_beside(match.blocks)):
            return Refusal(needed, available)
        return self._lease(
            namespace, tokens, match.blocks, match.n_tokens, fresh_blocks, shared_tokens
        )

    def _lease(
        self,
        namespace: Namespace,
        tokens: Tokens,
        adopted: Sequence[BlockId],
        adopted_tokens: int,
        fresh_blocks: int,
        shared_tokens: int = NEVER,
    ) -> Lease | Refusal:
        """Retain `adopted` and allocate the rest, or leave everything as it was."""
        if not self._groups.has_room():
            return Refusal(needed_blocks=1, available_blocks=0)
        blocks = self._supply.take_behind(adopted, fresh_blocks)
        if isinstance(blocks, Refusal):
            return blocks
        table = BlockTable(self._block_size, blocks)
        lease = Lease.adopting(namespace, tokens, table, adopted_tokens, shared_tokens)
        lease.group_states = self._groups.admit(table, lease.cached_tokens, len(tokens))
        return self._begin(lease)

    def _begin(self, lease: Lease) -> Lease:
        self._leases.add(lease)
        self.in_flight.begin(lease)
        return lease
