"""The KV store: hands sequences the blocks they need and shares equal prefixes among them.

probe       count the cached tokens of a prompt          nothing changes
admit       adopt what is cached, allocate the rest      a Lease, or a Refusal and no change
restore     allocate room for KV that comes from disk    a Lease that no step computes, or a Refusal
pin         keep a cached prefix from eviction           a Lease that no step computes, or None
plan        make the next tokens writable                None, or a Refusal and no change
plan_draft  plan draft tokens, which may be rejected     None, or a Refusal and no change
commit      a step has computed planned tokens           whole blocks are indexed for all to adopt
donate      end the lease                                its blocks go to the prefix cache
release     end the lease                                its references are dropped, soon
begin_step  drop references that are left                blocks may become free

Each of these queues the storage ops that it needs. `take_ops` hands them out for the next step. A
prefix is a hit only where every group (`kvstore/slots.py`) can resume, too.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from kvstore.in_flight import InFlight
from kvstore.lease import Lease, Refusal
from kvstore.node import NO_MATCH, Match
from kvstore.ops import CopyBlock, FillBlock, Parts, ReadBlock, StepOp, When
from kvstore.pool import BlockPool, BlockTable, blocks_for
from kvstore.slots import NEVER, Group, PlannedTokens
from kvstore.tokens import Tokens
from kvstore.tree import RadixTree
from kvstore.types import BlockId, Namespace, StoreCounters

MAX_RELEASED_BLOCKS = 4096
"""The blocks of leases that are released between two steps; the last lease may have more."""


class KVStore:
    """Leases of the blocks of `pool`, shared through `tree`. Belongs to the engine thread.

    Without a tree nothing is cached, and only forks share blocks.
    """

    def __init__(
        self,
        pool: BlockPool,
        tree: RadixTree | None,
        block_size: int,
        groups: Sequence[Group] = (),
    ) -> None:
        self.pool: Final = pool
        self.tree: Final = tree
        self.block_size: Final = block_size
        self.groups: Final = tuple(groups)
        for group in groups:
            pool.on_free(group.slots.forget)
        self.can_truncate: Final = all(group.can_truncate for group in groups)
        """Whether rejected draft tokens are overwritten; else their lease returns to a snapshot."""
        self.counters: Final = StoreCounters()
        self.in_flight: Final = None if tree is None else InFlight(block_size, groups, self.probe)
        self.leases: Final = set[Lease]()  # those that have not been released
        self.ended = deque[BlockTable]()
        """Tables of leases that were released, whose references are still to be dropped."""
        self._may_release = MAX_RELEASED_BLOCKS  # blocks, before the next step
        self.ops: list[StepOp] = []  # queued, for `take_ops`

    @property
    def available_blocks(self) -> int:
        """Number of blocks that could be handed out now, if need be by eviction."""
        return self.pool.n_free + self.pool.n_evictable

    def begin_step(self) -> None:
        """Drop references of leases that were released, a bounded number: many long leases may end
        at once. If blocks are short, all are dropped.
        """
        self._may_release = MAX_RELEASED_BLOCKS
        while self.ended and self._may_release > 0:
            self._drop(self.ended.popleft())

    def take_ops(self) -> list[StepOp]:
        """Hand out all ops that were queued since the last call, in the order of queueing."""
        ops, self.ops = self.ops, []
        return ops

    # Admission.

    def probe(self, namespace: Namespace, tokens: Tokens) -> int:
        """Number of a prompt's tokens that `admit` would adopt. Changes nothing, not recency."""
        return self._resumable(self._match(namespace, tokens, len(tokens) - 1), tokens)[0].n_tokens

    def continuation(self, namespace: Namespace, tokens: Tokens, most: int) -> tuple[int, ...]:
        """Up to `most` tokens that are cached after all of `tokens`, of several runs the one used
        last. Changes nothing, not recency.
        """
        if self.tree is None:
            return ()
        return self.tree.continuation(namespace, tokens.packed(0, len(tokens)), most)

    def admit(
        self,
        namespace: Namespace,
        tokens: Tokens,
        reserve_tokens: int = 0,
        spare_blocks: int = 0,
        shared_tokens: int = NEVER,
        *,
        adopts: bool = True,
    ) -> Lease | Refusal:
        """Adopt the longest cached prefix and allocate blocks for the rest, all or nothing.

        The last token of a prompt is never adopted: one must be computed to get logits. Nothing is
        adopted unless the request `adopts`. Blocks for `reserve_tokens` after the prompt are
        allocated as well, and `spare_blocks` remain available to others. Of what the lease computes
        at most the whole blocks of the first `shared_tokens` tokens are indexed.
        """
        found = self._match(namespace, tokens, len(tokens) - 1) if adopts else NO_MATCH
        match, losses = self._resumable(found, tokens)
        args = self.groups, reserve_tokens, spare_blocks, shared_tokens
        while isinstance(lease := self._lease(namespace, tokens, match, *args), Refusal):
            if not (tail := match.n_tokens % self.block_size):
                return lease
            # A copy of the partly matched block may need that very block: adopt whole blocks only.
            match, _ = self._resumable(match.until(match.n_tokens - tail, self.block_size), tokens)
        if self.tree is not None:
            self.tree.touch(match)
        for group, n_tokens in zip(self.groups, losses, strict=True):
            group.slots.unresumable_tokens += n_tokens
        self.counters.tail_hit_tokens += match.n_tokens % self.block_size
        if found.n_tokens - match.n_tokens >= self.block_size:  # less is not worth a step
            lease.checkpoint(tokens.whole_until(found.n_tokens))  # where the next will resume
        return lease

    def fork(
        self,
        lease: Lease,
        tokens: Tokens,
        n_tokens: int,
        reserve_tokens: int = 0,
        spare_blocks: int = 0,
    ) -> Lease | Refusal:
        """A second lease of the first `n_tokens` positions that `lease` has written.

        `tokens` begin with the same `n_tokens` tokens. Blocks are copied when either lease writes
        to them. The second lease begins with fewer tokens where a group cannot resume at
        `n_tokens`. `reserve_tokens` and `spare_blocks` are as in `admit`.
        Raises ValueError for positions that have not been written.
        """
        if n_tokens > lease.written_tokens:
            raise ValueError(f"{n_tokens} tokens to fork, {lease.written_tokens} written")
        blocks = tuple(lease.table[: blocks_for(n_tokens, self.block_size)])
        match, _ = self._resumable(Match(n_tokens, blocks), tokens)
        args = self.groups, reserve_tokens, spare_blocks, lease.shared_tokens
        forked = self._lease(lease.namespace, tokens, match, *args)
        if isinstance(forked, Lease):
            forked.is_fork = True
            forked.indexed_blocks = min(forked.indexed_blocks, lease.indexed_blocks)
            lease.ready_tokens = 0  # the last block that it has begun is shared now
        return forked

    def restore(
        self, namespace: Namespace, tokens: Tokens, have_tokens: int, spare_blocks: int = 0
    ) -> Lease | Refusal:
        """A lease for KV that is filled from disk, committed and donated; no step computes it.

        It adopts the whole blocks that are indexed, and of these the blocks of the first
        `have_tokens` tokens count as written. It has no group states, so nothing resumes from it.
        """
        found = self._match(namespace, tokens, len(tokens))
        adopted = found.blocks[: found.n_tokens // self.block_size]
        n_written = min(have_tokens // self.block_size, len(adopted)) * self.block_size
        return self._lease(namespace, tokens, Match(n_written, adopted), (), 0, spare_blocks)

    def pin(self, namespace: Namespace, tokens: Tokens) -> Lease | None:
        """A lease that holds the blocks of `tokens`, a number of whole blocks, until it is
        released; no step computes it. None unless all of them are indexed.
        """
        match = self._match(namespace, tokens, len(tokens))
        if match.n_tokens < len(tokens):
            return None
        lease = self._lease(namespace, tokens, match, (), 0, 0)
        assert isinstance(lease, Lease), "it needs no fresh block"
        lease.is_pin = True
        return lease

    def _match(self, namespace: Namespace, tokens: Tokens, n_tokens: int) -> Match:
        """The longest cached prefix of the first `n_tokens` tokens."""
        if self.tree is None:
            return NO_MATCH
        return self.tree.match(namespace, tokens.packed(0, n_tokens))

    def _resumable(self, match: Match, tokens: Tokens) -> tuple[Match, list[int]]:
        """The longest beginning of the match after which all groups can resume and which cuts no
        image of `tokens.wholes`, and the tokens lost to each group.
        """
        losses, n_tokens, tried = [0] * len(self.groups), match.n_tokens, None
        while n_tokens != tried:
            tried, n_tokens = n_tokens, tokens.whole_until(n_tokens)
            for index, group in enumerate(self.groups):
                point = group.resume_point(match.blocks, n_tokens)
                losses[index] += n_tokens - point
                n_tokens = point
        return match.until(n_tokens, self.block_size), losses

    def _lease(
        self,
        namespace: Namespace,
        tokens: Tokens,
        match: Match,
        groups: Sequence[Group],
        reserve_tokens: int,
        spare_blocks: int,
        shared_tokens: int = NEVER,
    ) -> Lease | Refusal:
        """Adopt `match` with a state in each of `groups`, all or nothing. See also `admit`."""
        n_fresh = blocks_for(len(tokens) + reserve_tokens, self.block_size) - len(match.blocks)
        n_copied = 1 if match.n_tokens % self.block_size else 0
        if not all(group.has_room() for group in groups):
            return Refusal(needed_blocks=1, available_blocks=0)
        n_pinned = self.pool.n_unlisted(match.blocks)
        available = self.available_blocks - n_pinned
        if (needed := n_fresh + n_copied + spare_blocks) > available:
            if self.ended:
                self._drop_all()
                args = groups, reserve_tokens, spare_blocks, shared_tokens
                return self._lease(namespace, tokens, match, *args)
            return Refusal(needed, available)
        self.pool.retain(match.blocks)  # before anything is evicted, or it could be these
        fresh = self._allocate(n_fresh)
        if isinstance(fresh, Refusal):
            self._release(match.blocks)
            return fresh
        table = BlockTable(self.block_size, (*match.blocks, *fresh))
        states = (group.admit(table, match.n_tokens, len(tokens), self.ops) for group in groups)
        lease = Lease(
            namespace=namespace,
            tokens=tokens,
            table=table,
            cached_tokens=match.n_tokens,
            written_tokens=match.n_tokens,
            planned_tokens=match.n_tokens,
            indexed_blocks=match.n_tokens // self.block_size,
            shared_tokens=shared_tokens,
            group_states=tuple(states),
        )
        self.leases.add(lease)
        if self.in_flight is not None:
            self.in_flight.begin(lease)
        return lease

    # Steps.

    def plan(self, lease: Lease, n_tokens: int, sampled_position: int = 0) -> Refusal | None:
        """Plan the next `n_tokens` (at least one) positions and make them writable, or nothing.

        A block that others refer to is replaced by a copy. The token at `sampled_position` is
        computed with the decodes, after all prefills; `Lease.max_step_tokens` limits `n_tokens`.
        """
        end = lease.planned_tokens + n_tokens
        if end <= lease.ready_tokens:
            lease.planned_tokens = end
            return None
        copies = self._ensure_private(lease, end)
        if isinstance(copies, Refusal):
            return copies
        planned = PlannedTokens(lease.planned_tokens, end, sampled_position, copies)
        for state in lease.group_states:
            state.plan(lease.table, planned, self.ops)
            lease.ready_tokens = min(lease.ready_tokens, state.ready_tokens(end))
            lease.due_tokens = min(lease.due_tokens, state.due_tokens())
        lease.planned_tokens = end
        lease.is_patched = True
        self._release([copy.source for copy in copies.values()])
        return None

    def plan_draft(self, lease: Lease, n_tokens: int) -> Refusal | None:
        """Plan `n_tokens` draft tokens after the last token of the next step.

        The lease's next `commit` says how many of them were accepted. No further step may be
        planned before it. A draft that a group could not roll back is refused.
        """
        end = lease.planned_tokens + n_tokens
        if not all(state.can_snapshot(lease.planned_tokens, end) for state in lease.group_states):
            return Refusal(needed_blocks=1, available_blocks=0)
        refusal = self.plan(lease, n_tokens)
        if refusal is None and not self.can_truncate:
            for state in lease.group_states:
                state.snapshot(self.ops)
            lease.has_snapshot = True
            lease.due_tokens = 0  # `commit` must look at the snapshot
        return refusal

    def commit(self, lease: Lease, n_computed: int, n_accepted: int | None = None) -> None:
        """A step has computed `n_computed` planned tokens, of which the first `n_accepted` (None:
        all) are the sequence's. `lease.tokens` has these already.

        If some were rejected, the accepted ones count as written and the rest is no longer planned.
        A lease with a snapshot returns to it instead: none of the tokens counts as written, and the
        caller plans the accepted ones again. Where `n_computed` exceeds what is planned (KV from
        disk), the plan grows with it. Whole blocks that are written are indexed, and what groups
        have saved is attached to them.
        """
        written = lease.written_tokens + (n_computed if n_accepted is None else n_accepted)
        is_due = written >= lease.due_tokens
        if is_due and lease.has_snapshot:
            is_accepted = n_accepted is None or n_accepted == n_computed
            lease.end_snapshot(is_accepted=is_accepted)
            if not is_accepted:
                return
        lease.written_tokens = written
        if n_accepted is not None or lease.planned_tokens < written:
            lease.planned_tokens = written
        if is_due:
            if (n_blocks := lease.indexable_tokens // self.block_size) > lease.indexed_blocks:
                self._index(lease, n_blocks * self.block_size)
            lease.due_tokens = (written // self.block_size + 1) * self.block_size
            has_saved = False
            for state in lease.group_states:
                has_saved |= state.advance(lease.table, written)
                lease.due_tokens = min(lease.due_tokens, state.due_tokens())
            if has_saved:
                self._attach_at_end(lease)

    def fill(self, block: BlockId, n_tokens: int, parts: Parts, *, is_new: bool) -> bool:
        """Queue fills of what memory lacks of the first `n_tokens` tokens of a block.

        `parts` are the bytes of the block, if it `is_new`, and of each group. Returns whether
        anything was queued.
        """
        n_ops = len(self.ops)
        if is_new and parts[0] is not None:
            self.ops.append((When.FIRST, FillBlock(block, parts[0])))
        for group, part in zip(self.groups, parts[1:], strict=False):
            if part is not None and group.attached(block, n_tokens) is None:
                group.fill(block, n_tokens, part, self.ops)
        return len(self.ops) > n_ops

    def read(self, read: ReadBlock) -> None:
        """Queue a read, after all that the next step writes."""
        self.ops.append((When.READ, read))

    def revoke(self, ops: Iterable[StepOp]) -> None:
        """Cache nothing that rests on these ops: they were not, or perhaps not, carried out."""
        for _, op in ops:
            if not isinstance(op, ReadBlock):
                for group in self.groups:
                    group.revoke(op)

    # The end.

    def donate(self, lease: Lease) -> None:
        """Release the lease and leave its written blocks, tail included, in the prefix cache. If
        only its first tokens are shared, only their whole blocks.

        Raises ValueError when the lease has been released before.
        """
        if lease.has_snapshot:
            lease.end_snapshot(is_accepted=False)
        if lease in self.leases and (n_tokens := lease.indexable_tokens):
            self._index(lease, n_tokens)
            block = self._attach_at_end(lease) if self.groups else None
            if block is not None:
                block_tokens = (lease.written_tokens - 1) % self.block_size + 1
                ahead_tokens = lease.planned_tokens - lease.written_tokens
                for state in lease.group_states:
                    state.donate(block, block_tokens, ahead_tokens, self.ops)
        self.release(lease)

    def release(self, lease: Lease) -> None:
        """Drop the lease's references. Raises ValueError when that has been done before."""
        if lease not in self.leases:
            raise ValueError("the lease has been released before")
        self.leases.remove(lease)
        if self.in_flight is not None:
            self.in_flight.end(lease)
        for state in lease.group_states:
            state.release()
        if self._may_release > 0:
            self._drop(lease.table)
        else:
            self.ended.append(lease.table)
            self.pool.n_releases += 1  # room for those who were refused some

    def clear(self, namespace: Namespace | None = None) -> None:
        """Remove one namespace, or all, from the index. `forget_cleared` frees its blocks.

        Leases keep their blocks. These are indexed again with the next whole block that their lease
        commits.
        """
        if self.tree is not None:
            self.tree.clear(namespace)

    def forget_cleared(self, most: float = math.inf) -> int | None:
        """Drop the references of one lease that was released, or else those of the tree to some
        `most` cleared blocks. Returns how many became free; None where nothing is left to do.
        """
        n_free = self.pool.n_free
        if self.ended:
            self._drop(self.ended.popleft())
        elif self.tree is None or not self.tree.forget_cleared(most):
            return None
        return self.pool.n_free - n_free

    # Blocks.

    def _allocate(self, n_blocks: int) -> list[BlockId] | Refusal:
        """Free blocks with one reference each, evicting as many as it takes."""
        if n_blocks > self.available_blocks:
            self._drop_all()
        if n_blocks > self.available_blocks:
            return Refusal(n_blocks, self.available_blocks)
        while self.pool.n_free < n_blocks:
            if self.tree is not None and self.tree.forget_cleared(1):
                continue
            if self.tree is None or self.tree.evict() is None:
                # A table has a block below what is evictable.
                return Refusal(n_blocks, self.pool.n_free)
            self.counters.evictions += 1
        return self.pool.allocate(n_blocks)

    def _drop_all(self) -> None:
        """Drop the references of all leases that were released."""
        while self.ended:
            self._drop(self.ended.popleft())

    def _drop(self, table: BlockTable) -> None:
        """Drop the references of a lease that was released."""
        self._may_release -= len(table)
        self._release(table)

    def _release(self, blocks: Sequence[BlockId]) -> None:
        """Drop a table's references. What only the prefix cache has now can be evicted."""
        evictable = self.pool.release(blocks)
        if self.tree is not None:
            self.tree.offer(evictable)

    def _ensure_private(self, lease: Lease, end_tokens: int) -> Mapping[int, CopyBlock] | Refusal:
        """Copy shared blocks and allocate missing ones from the planned tokens up to `end_tokens`.

        Returns the copies by their entry of the table. Their sources are still retained.
        """
        pool, table, start = self.pool, lease.table, lease.planned_tokens
        end = blocks_for(end_tokens, self.block_size)
        reached = range(start // self.block_size, min(end, len(table)))
        shared = [entry for entry in reached if pool.total_refs(table[entry]) > 1]
        blocks = self._allocate(len(shared) + max(end - len(table), 0))
        if isinstance(blocks, Refusal):
            return blocks
        table.extend(blocks[len(shared) :])
        lease.ready_tokens = end * self.block_size
        copies = dict[int, CopyBlock]()
        for entry, target in zip(shared, blocks, strict=False):
            source, n_tokens = table.repoint(entry, target), start - entry * self.block_size
            copy = copies[entry] = CopyBlock(source, target, max(n_tokens, 0))
            self.ops.append((When.FIRST, copy))
            for group in self.groups:
                group.slots.copy(source, target, copy.n_tokens)
        if lease.is_fork or start > lease.cached_tokens:  # it has written there
            self.counters.fork_copies += len(copies)
        else:
            self.counters.prefix_copies += len(copies)
        return copies

    def _index(self, lease: Lease, n_tokens: int) -> None:
        """Index the blocks of the first `n_tokens` tokens. If blocks of equal tokens are already
        indexed, the table is repointed to these.
        """
        if self.tree is None:
            return
        first, after = lease.indexed_blocks, None
        if first and self.tree.has_whole(lease.table[first - 1]):
            after = lease.table[first - 1]  # costs the same at any depth
        else:  # cleared, and perhaps a part of the block indexed again by a fork of the lease
            first = 0
        packed = lease.tokens.packed(first * self.block_size, n_tokens)
        blocks = lease.table[first : blocks_for(n_tokens, self.block_size)]
        lease.indexed_blocks = n_tokens // self.block_size
        equal = self.tree.insert(lease.namespace, packed, blocks, after)
        for entry, block in enumerate(equal, first):
            if (old := lease.table[entry]) != block:
                for group in self.groups:
                    group.slots.copy(old, block, self.block_size)
                self.pool.retain((block,))
                lease.table.repoint(entry, block)
                self._release((old,))
                lease.is_patched = True

    def _attach_at_end(self, lease: Lease) -> BlockId | None:
        """Find the indexed block that holds the lease's last written token, and attach to it what
        groups have attached to the lease's own block. None if there is none.

        It may be another lease's block, with other tokens after these.
        """
        n_tokens = lease.written_tokens
        match = self._match(lease.namespace, lease.tokens, n_tokens)
        if match.n_tokens < n_tokens:
            return None
        entry, offset = divmod(n_tokens - 1, self.block_size)
        if (own := lease.table[entry]) != match.blocks[-1]:
            for group in self.groups:
                group.slots.copy(own, match.blocks[-1], offset + 1)
        return match.blocks[-1]
