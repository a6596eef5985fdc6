"""The KV store: hands sequences the blocks they need and shares equal prefixes among them.

probe  how much of a prompt is here?          changes nothing
restore what was here before is filled in     a Lease of no steps, or a Refusal
admit  adopt what is here, allocate the rest  a Lease, or a Refusal and no trace
extend room for the next tokens, and planned  orders for the arena, or a Refusal
publish these tokens' KV has been written     whole blocks become visible to all
donate / release  the sequence has ended      its blocks go to the index / are let go

A prefix is a hit only where every group (see kvstore/groups/) can resume, too.
"""

from collections.abc import Sequence

from kvstore.actions import NO_ORDERS, CopyBlock, Order, Room
from kvstore.block_pool import BlockPool
from kvstore.block_supply import BlockSupply, StoreCounters
from kvstore.block_table import BlockTable, blocks_for
from kvstore.groups.group import Group, resume_point
from kvstore.lease import Lease, Refusal
from kvstore.prefix_index import PrefixIndex
from kvstore.publication import Publication
from kvstore.radix_node import Match
from kvstore.tokens import Tokens
from kvstore.types import BlockId, Namespace


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
        self._published = Publication(index, block_size)
        self._groups = tuple(groups)
        self._leases: set[Lease] = set()
        self._orders: list[Order] = []  # of groups, for the next step
        self.announcements = index.announcements(self.probe, self.checkpoint)
        for group in self._groups:
            pool.when_freed(group.forget)
        self.counters = StoreCounters()
        self._supply = BlockSupply(pool, index, self.counters)

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
        return self._groups

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

    def admit(
        self, namespace: Namespace, tokens: Tokens, reserve_tokens: int = 0, spare_blocks: int = 0
    ) -> Lease | Refusal:
        """Adopt the longest indexed prefix and allocate blocks for the rest, all or nothing.

        The last token of a prompt is never adopted: one must be computed to get logits. There is
        room for `reserve_tokens` behind the prompt, and `spare_blocks` remain available to others.
        """
        found = self._match(namespace, tokens)
        match = self._resumable(found)
        lease = self._admit(namespace, tokens, match, reserve_tokens, spare_blocks)
        while isinstance(lease, Refusal) and (tail_tokens := match.n_tokens % self._block_size):
            # Its copy may need the very block that it stands in: do without what matched of that.
            match = self._resumable(match.until(match.n_tokens - tail_tokens, self._block_size))
            lease = self._admit(namespace, tokens, match, reserve_tokens, spare_blocks)
        if isinstance(lease, Lease):
            self._index.touch(match)
            if found.n_tokens - match.n_tokens >= self._block_size:  # less is not worth a step
                self.checkpoint(lease, found.n_tokens)  # here the next one will want to resume
        return lease

    def admit_cold(
        self, namespace: Namespace, tokens: Tokens, reserve_tokens: int = 0, spare_blocks: int = 0
    ) -> Lease | Refusal:
        """The same, adopting nothing: for a prompt of which every token must be computed."""
        return self._admit(namespace, tokens, Match(0, (), ()), reserve_tokens, spare_blocks)

    def restore(
        self, namespace: Namespace, tokens: Tokens, have_tokens: int, spare_blocks: int = 0
    ) -> Lease | Refusal:
        """A lease for KV that no step computes: it is filled in, published and donated.

        It adopts the whole blocks that are indexed and counts as written what fills blocks of
        `have_tokens`. Nobody goes on behind it, so it has no share of the groups.
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
        n, table = whole * self._block_size, BlockTable(self._block_size, blocks)
        return self._begin(Lease(namespace, tokens, table, n, n, n, 0, 0, whole))

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
        n_tokens = resume_point(self._groups, lease.table, n_tokens)
        shared = tuple(lease.table[: blocks_for(n_tokens, self._block_size)])
        fresh_blocks = blocks_for(len(tokens) + reserve_tokens, self._block_size) - len(shared)
        needed = fresh_blocks + (1 if n_tokens % self._block_size else 0) + spare_blocks
        if needed > self.available_blocks:
            return Refusal(needed, self.available_blocks)
        lease.ready_tokens = 0  # the last block that it has begun is shared now
        return self._lease(lease.namespace, tokens, shared, n_tokens, fresh_blocks)

    def stride(self, lease: Lease, n_tokens: int, split: int = 0) -> int:
        """How many of the next `n_tokens` tokens the next step may compute, at least one.

        It would compute those from position `split` on behind the others.
        """
        for share in lease.shares:
            n_tokens = share.stride(lease.planned_tokens, n_tokens, split)
        return n_tokens

    def checkpoint(self, lease: Lease, n_tokens: int) -> None:
        """Somebody will want to resume behind the first `n_tokens` tokens of this lease."""
        if n_tokens > lease.planned_tokens:
            for share in lease.shares:
                share.checkpoint(n_tokens)
            lease.ready_tokens = min(lease.ready_tokens, n_tokens - 1)

    def extend(self, lease: Lease, n_tokens: int, split: int = 0) -> Room | Refusal:
        """Plan the next `n_tokens` (at least one) positions and make them writable, or nothing.

        No block that is written has another holder: a shared one is replaced by a copy. The orders
        are for the next step, those among them that admissions have left. `split`: see `stride`.
        """
        end_tokens = lease.planned_tokens + n_tokens
        if end_tokens <= lease.ready_tokens:
            lease.planned_tokens = end_tokens
            return NO_ORDERS
        copies = self._make_writable(lease, end_tokens)
        if isinstance(copies, Refusal):
            return copies
        room = lease.plan(end_tokens, split, copies, self.take_orders())
        self._supply.drop([copy.source for copy in copies])
        return room

    def take_orders(self) -> list[Order]:
        """Those for the next step that have not been given out with room."""
        orders, self._orders = self._orders, []
        return orders

    def revoke(self, orders: Sequence[Order]) -> None:
        """These were not, or perhaps not, carried out: nothing that rests on them is cached."""
        for group in self._groups:
            group.revoke(orders)

    def publish(self, lease: Lease, n_tokens: int) -> None:
        """The KV of the lease's first `n_tokens` tokens has been written: index whole blocks.

        Where an equal block is indexed already the table is repointed to it.
        """
        published = lease.written_tokens // self._block_size
        lease.written_tokens = n_tokens
        lease.planned_tokens = max(lease.planned_tokens, n_tokens)  # of what no step computes
        if n_tokens < lease.due_tokens:
            return
        if (whole := n_tokens // self._block_size) > published:
            self._insert(lease, whole * self._block_size)
        saved = [share.advance(lease.table, n_tokens) for share in lease.shares]
        lease.note_due((whole + 1) * self._block_size)
        if any(saved):
            self._leave_to_index(lease)

    def donate(self, lease: Lease) -> None:
        """Release the lease, leaving all that it has written to the index, the tail too.

        Raises ValueError when the lease has been released before.
        """
        if lease in self._leases and lease.written_tokens:
            self._insert(lease, lease.written_tokens)
            self._donate_shares(lease)
        self.release(lease)

    def release(self, lease: Lease) -> None:
        """Drop the lease's references. Raises ValueError when that has been done before."""
        if lease not in self._leases:
            raise ValueError("the lease has been released before")
        self._leases.remove(lease)
        self.announcements.retract(lease)
        for share in lease.shares:
            share.release()
        self._supply.drop(lease.table[:])

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
        n_tokens = resume_point(self._groups, match.blocks, match.n_tokens)
        return match if n_tokens == match.n_tokens else match.until(n_tokens, self._block_size)

    def _admit(
        self,
        namespace: Namespace,
        tokens: Tokens,
        match: Match,
        reserve_tokens: int,
        spare_blocks: int,
    ) -> Lease | Refusal:
        table_blocks = blocks_for(len(tokens) + reserve_tokens, self._block_size)
        fresh_blocks = table_blocks - len(match.blocks)
        forked_blocks = 1 if match.n_tokens % self._block_size else 0
        needed = fresh_blocks + forked_blocks + spare_blocks
        if needed > (available := self._supply.available_beside(match.blocks)):
            return Refusal(needed, available)
        return self._lease(namespace, tokens, match.blocks, match.n_tokens, fresh_blocks)

    def _lease(
        self,
        namespace: Namespace,
        tokens: Tokens,
        adopted: Sequence[BlockId],
        adopted_tokens: int,
        fresh_blocks: int,
    ) -> Lease | Refusal:
        """Hold `adopted` and allocate the rest, or leave everything as it was."""
        if not all(group.has_room() for group in self._groups):
            return Refusal(needed_blocks=1, available_blocks=0)
        blocks = self._supply.take_behind(adopted, fresh_blocks)
        if isinstance(blocks, Refusal):
            return blocks
        n, table = adopted_tokens, BlockTable(self._block_size, blocks)
        lease = Lease(namespace, tokens, table, n, n, n, 0, 0, n // self._block_size)
        for group in self._groups:
            share, orders = group.admit(table, adopted_tokens, len(tokens))
            lease.shares += (share,)
            self._orders += orders
        return self._begin(lease)

    def _begin(self, lease: Lease) -> Lease:
        self._leases.add(lease)
        self.announcements.announce(lease)
        return lease

    def _make_writable(self, lease: Lease, end_tokens: int) -> Sequence[CopyBlock] | Refusal:
        """Blocks of the lease's own for what it has not written, up to `end_tokens`."""
        first = lease.planned_tokens // self._block_size
        end = blocks_for(end_tokens, self._block_size)
        reached = range(first, min(end, len(lease.table)))
        shared = [i for i in reached if self._pool.count(lease.table[i]) > 1]
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
            self._carry_over(source, target, copied_tokens)
        self.counters.cow_copies += len(copies)
        return copies

    def _carry_over(self, source: BlockId, target: BlockId, n_tokens: int) -> None:
        for group in self._groups:
            group.copy(source, target, n_tokens)

    def _donate_shares(self, lease: Lease) -> None:
        """Leave to the index what the groups have at the lease's end, if the index has that."""
        if self._groups and (block := self._leave_to_index(lease)) is not None:
            last_tokens = (lease.written_tokens - 1) % self._block_size + 1
            ahead_tokens = lease.planned_tokens - lease.written_tokens
            for share in lease.shares:
                self._orders += share.donate(block, last_tokens, ahead_tokens)

    def _leave_to_index(self, lease: Lease) -> BlockId | None:
        """The indexed block with the last written token, if there is one.

        It may be another's, which begins with the same tokens as the lease's own and goes on
        otherwise; then it carries from now on what the lease's own does up to here.
        """
        index, before = divmod(lease.written_tokens - 1, self._block_size)
        indexed, own = self._published.holder(lease), lease.table[index]
        if indexed is not None and own != indexed:
            self._carry_over(own, indexed, before + 1)
        return indexed

    def _insert(self, lease: Lease, n_tokens: int) -> None:
        first, equal = self._published.insert(lease, n_tokens)
        self._repoint(lease, first, equal)

    def _repoint(self, lease: Lease, first: int, blocks: Sequence[BlockId]) -> None:
        """Let the table go on from `first` with `blocks`, which hold the same tokens as its own."""
        for i, block in enumerate(blocks, first):
            if (own := lease.table[i]) != block:
                for group in self._groups:
                    group.repoint(own, block)
                self._pool.hold((block,))
                self._supply.drop((lease.table.repoint(i, block),))
                lease.is_patched = True
