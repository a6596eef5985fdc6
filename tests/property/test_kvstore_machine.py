"""KVStore against a naive model: what every slot holds, and what was ever indexed.

The arena is a dictionary that says of each slot for which tokens its KV was computed. The property:
a lease never claims a slot, and the index never offers one, that was computed for another prefix.
Images in prompts have the ids of their content. Those whose tokens see each other are never cut.
Steps are planned for several leases and run together, as the scheduler does: copies in the order in
which they were given, then the writes; in between others may come, go and be evicted.
"""

from dataclasses import dataclass, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvstore import invariants
from kvstore.in_flight import QueuedPrompt
from kvstore.lease import Lease, Refusal
from kvstore.ops import CopyBlock
from kvstore.pool import BlockPool
from kvstore.store import KVStore
from kvstore.tokens import TOKEN_BYTES, Tokens
from kvstore.tree import RadixTree
from kvstore.types import BlockId, Namespace
from tests.profiles import examples
from tests.property.naive_store import (
    PICTURES,
    Arena,
    Ids,
    Indexed,
    Picture,
    all_of,
    common_prefix,
    flat,
    ids_of_path,
    tokens_of,
    without_cut_picture,
)
from tests.unit.kv_helpers import walk

NAMESPACES = (Namespace(model="m"), Namespace(model="m", cache_salt="tenant"))


@dataclass(frozen=True)
class Prompt:
    """Begins like the `like`-th of those before, up to `cut` or the image there, and goes on with
    `more`.
    """

    like: int
    cut: int
    more: list[int | Picture]


namespaces = st.sampled_from(NAMESPACES)
token_ids = st.integers(0, 2)
which = st.integers(0, 99)
"""Picks one of what there is: a live lease, an earlier prompt, a position."""
items = token_ids | st.sampled_from(PICTURES)
prompts = st.builds(Prompt, which, st.integers(0, 20), st.lists(items, min_size=1, max_size=8))


class KVStoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.start(1, 1)

    @initialize(n_blocks=st.integers(3, 60), block_size=st.integers(2, 4))
    def start(self, n_blocks: int, block_size: int) -> None:
        pool = BlockPool(n_blocks)
        self.tree = RadixTree(pool, block_size, hashes_blocks=True)
        self.store = KVStore(pool, self.tree, block_size)
        self.arena = Arena(n_blocks, block_size)
        self.block_size = block_size
        self.indexed = {namespace: Indexed(set()) for namespace in NAMESPACES}
        self.evictions = 0
        self.prompts: list[Ids] = [(0,)]
        self.live: list[Lease] = []
        self.published: dict[Lease, Ids] = {}  # whole blocks that are indexed and held
        self.planned: dict[Lease, int] = {}  # tokens that the next step writes
        self.copies: list[CopyBlock] = []
        self.pending: list[QueuedPrompt] = []
        self.admitted_tokens: dict[Lease, int] = {}

    # Looking and coming.

    @precondition(lambda self: self.indexed_runs() > 0)
    @rule(namespace=namespaces, prompt=prompts)
    def probe(self, namespace: Namespace, prompt: Prompt) -> None:
        before, ids = self.snapshot(), self.ids_for(prompt)
        self.check_hit(namespace, ids, self.store.probe(namespace, tokens_of(ids)))
        assert self.snapshot() == before

    @rule(
        namespace=namespaces,
        prompt=prompts,
        reserve=st.integers(0, 5),
        spare=st.sampled_from((0, 2)),
    )
    def admit(self, namespace: Namespace, prompt: Prompt, reserve: int, spare: int) -> None:
        self.admitted(namespace, prompt, reserve, spare)

    @rule(namespace=namespaces, prompt=prompts, answer=st.lists(token_ids, max_size=4))
    def serve(self, namespace: Namespace, prompt: Prompt, answer: list[int]) -> None:
        """A whole request while the others stand still."""
        lease = self.admitted(namespace, prompt, len(answer), 0)
        if isinstance(lease, Refusal):
            return
        self.compute(lease)
        for token_id in answer:
            self.append(lease, token_id)
            self.compute(lease)
        self.donated(lease)

    @rule(namespace=namespaces, prompt=prompts)
    def admit_cold(self, namespace: Namespace, prompt: Prompt) -> None:
        before = self.snapshot()
        lease = self.store.admit(namespace, tokens_of(self.ids_for(prompt)), adopts=False)
        self.joined(lease, before)
        assert isinstance(lease, Refusal) or lease.cached_tokens == 0

    @rule(namespace=namespaces, prompt=prompts)
    def expect(self, namespace: Namespace, prompt: Prompt) -> None:
        pending = QueuedPrompt(namespace, tokens_of(self.ids_for(prompt)))
        self.pending.append(pending)
        assert self.must_wait(pending) is self.is_worth_a_wait(pending)

    @precondition(lambda self: self.pending)
    @rule(at=which)
    def admit_or_wait(self, at: int) -> None:
        """As the scheduler does."""
        pending = self.pending[at % len(self.pending)]
        if self.must_wait(pending):
            return
        before = self.snapshot()
        lease = self.store.admit(pending.namespace, pending.tokens)
        self.joined(lease, before)
        if isinstance(lease, Lease):
            self.pending.remove(pending)

    @precondition(lambda self: self.pending)
    @rule(at=which)
    def withdraw(self, at: int) -> None:
        self.pending.pop(at % len(self.pending))

    # Of a lease outside the step: else the fork would share a block that is about to be written.
    @precondition(lambda self: self.idle())
    @rule(at=which, cut=which, more=st.lists(items, min_size=1, max_size=4))
    def fork(self, at: int, cut: int, more: list[int | Picture]) -> None:
        before, lease = self.snapshot(), self.pick(at)
        shared = without_cut_picture(ids_of(lease)[: cut % (lease.written_tokens + 1)])
        tokens, n_tokens = tokens_of((*shared, *flat(more))), len(shared)
        other = self.store.fork(lease, tokens, n_tokens)
        self.joined(other, before)
        if isinstance(other, Lease):
            assert other.cached_tokens == n_tokens

    # Going on.

    @precondition(lambda self: self.idle())
    @rule(at=which, token_id=token_ids)
    def sample(self, at: int, token_id: int) -> None:
        self.append(self.pick(at), token_id)

    @precondition(lambda self: self.idle())
    @rule(at=which, chunk_tokens=st.integers(1, 14))
    def plan(self, at: int, chunk_tokens: int) -> None:
        self.plan_for(self.pick(at), chunk_tokens)

    @precondition(lambda self: self.idle())
    @rule()
    def step(self) -> None:
        """One step over all that is left to compute, as far as there is room."""
        for lease in self.idle():
            self.plan_for(lease, len(lease.tokens))
        self.run_step()

    @precondition(lambda self: self.planned)
    @rule()
    def run_step(self) -> None:
        for op in self.copies:
            self.arena.copy(op)
        for lease, n_tokens in self.planned.items():
            self.write(lease, n_tokens)
        for lease, n_tokens in self.planned.items():
            self.commit(lease, n_tokens)
        self.planned.clear()
        self.copies.clear()

    @precondition(lambda self: self.planned)
    @rule()
    def fail_step(self) -> None:
        """What was planned is let go without a trace: no copy was made, nothing was written."""
        for lease in self.planned:
            self.store.release(self.left(lease))
        self.planned.clear()
        self.copies.clear()

    # Leaving.

    @precondition(lambda self: self.idle())
    @rule(at=which)
    def release(self, at: int) -> None:
        self.store.release(self.left(self.pick(at)))

    @precondition(lambda self: self.idle())
    @rule(at=which)
    def donate(self, at: int) -> None:
        self.donated(self.pick(at))

    @precondition(lambda self: self.indexed_runs() > 5)
    @rule(namespace=namespaces | st.none())
    def clear(self, namespace: Namespace | None) -> None:
        self.store.clear(namespace)
        for name in NAMESPACES if namespace is None else (namespace,):
            self.indexed[name] = Indexed(set())
        for lease in self.live:
            if namespace in (None, lease.namespace):
                self.published[lease] = ()

    @rule(most=st.integers(1, 20))
    def forget_cleared(self, most: int) -> None:
        """All sequences are served alike before, during and after this."""
        n_free = self.store.pool.n_free
        n_freed = self.store.forget_cleared(most)
        assert (n_freed or 0) == self.store.pool.n_free - n_free

    # What must hold after each of them.

    @invariant()
    def everything_adds_up(self) -> None:
        invariants.check(self.store)

    @invariant()
    def no_slot_was_computed_for_another_prefix(self) -> None:
        if self.copies:  # until the step has run, copies claim what is yet to be copied
            return
        for lease in self.live:
            self.check_slots(lease.namespace, lease.table[:], ids_of(lease)[: lease.written_tokens])
        for namespace, path, node in walk(self.tree):
            ids = ids_of_path(path)
            first = (len(path) - len(node.packed)) // TOKEN_BYTES
            self.check_slots(namespace, node.blocks, ids, first)
        for block in self.store.pool.free_blocks():
            self.arena.wipe(block)

    @invariant()
    def what_is_published_and_held_is_hit(self) -> None:
        self.note_evictions()
        for lease, run in self.published.items():
            assert self.store.probe(lease.namespace, Tokens((*run, 0))) >= len(run)

    @invariant()
    def who_waits_is_waiting_for_more_than_there_is(self) -> None:
        for pending in self.pending:
            assert self.store.in_flight is not None
            lease = pending.awaited
            if lease and self.store.in_flight.will_be_indexed(lease, pending.until_tokens):
                assert lease in self.live
                assert lease.written_tokens < pending.until_tokens <= self.shared(lease, pending)

    def teardown(self) -> None:
        for lease in self.live:
            self.store.release(lease)
        invariants.check_idle(self.store)
        while self.store.forget_cleared(1) is not None:
            invariants.check_idle(self.store)
        while self.tree.evict() is not None:
            invariants.check_idle(self.store)
        assert self.store.pool.n_free == self.store.pool.n_blocks

    # The model.

    def indexed_runs(self) -> int:
        return sum(len(indexed.runs) for indexed in self.indexed.values())

    def ids_for(self, prompt: Prompt) -> Ids:
        like = self.prompts[prompt.like % len(self.prompts)]
        return (*without_cut_picture(like[: prompt.cut]), *flat(prompt.more))

    def idle(self) -> list[Lease]:
        """The leases that are not part of the step being planned."""
        return [lease for lease in self.live if lease not in self.planned]

    def pick(self, at: int) -> Lease:
        leases = self.idle()
        return leases[at % len(leases)]

    def admitted(
        self, namespace: Namespace, prompt: Prompt, reserve: int, spare: int
    ) -> Lease | Refusal:
        before, ids = self.snapshot(), self.ids_for(prompt)
        hit_tokens = self.store.probe(namespace, tokens_of(ids))
        lease = self.store.admit(namespace, tokens_of(ids), reserve, spare)
        self.joined(lease, before)
        if isinstance(lease, Lease):
            assert lease.cached_tokens in self.adoptable(lease.tokens, hit_tokens)
            assert len(lease.table) * self.block_size >= len(ids) + reserve
            assert self.store.available_blocks >= spare
        return lease

    def must_wait(self, pending: QueuedPrompt) -> bool:
        """Whether it must wait, and then for a lease that is under way."""
        assert self.store.in_flight is not None
        found = self.store.in_flight.must_wait(pending)
        awaited = self.store.in_flight.awaited(pending)
        assert found is (awaited is not None)
        assert awaited is None or awaited in self.live
        return found

    def is_worth_a_wait(self, pending: QueuedPrompt) -> bool:
        """Whether a lease computes more of it than is indexed, and will soon be that far."""
        indexed = self.store.probe(pending.namespace, pending.tokens)
        return any(
            lease.namespace == pending.namespace
            and self.shared(lease, pending) > lease.written_tokens
            and self.shared(lease, pending) - indexed > indexed - lease.written_tokens
            for lease in self.live
        )

    def shared(self, lease: Lease, pending: QueuedPrompt) -> int:
        """How many tokens both begin with, in whole blocks that the lease was admitted with."""
        own, other = ids_of(lease)[: self.admitted_tokens[lease]], all_of(pending.tokens)[:-1]
        common = common_prefix(own, other)
        return self.uncut(pending.tokens, range(0, common + 1, self.block_size))

    def adoptable(self, tokens: Tokens, hit_tokens: int) -> list[int]:
        """How many tokens of a hit are adopted, which depends on the room for a copied block."""
        found = [hit_tokens]
        while tail := found[-1] % self.block_size:
            found.append(self.uncut(tokens, range(found[-1] - tail + 1)))
        return found

    def uncut(self, tokens: Tokens, ends: range) -> int:
        """The last of these positions that cuts no image whose tokens see each other."""
        return max(end for end in ends if not self.is_cut(tokens, end))

    def is_cut(self, tokens: Tokens, end: int) -> bool:
        """Whether an image whose tokens see each other goes on there."""
        return any(first < end < stop for first, stop in tokens.wholes)

    def append(self, lease: Lease, token_id: int) -> None:
        if lease.written_tokens == len(lease.tokens):
            lease.tokens.append(token_id)

    def compute(self, lease: Lease) -> None:
        self.plan_for(lease, len(lease.tokens))
        self.run_step()

    def plan_for(self, lease: Lease, chunk_tokens: int) -> None:
        n_left = len(lease.tokens) - lease.written_tokens
        if n_left == 0:
            return
        n_tokens = lease.max_step_tokens(min(chunk_tokens, n_left))
        assert 0 < n_tokens <= n_left
        assert not self.is_cut(lease.tokens, lease.written_tokens + n_tokens)
        before = self.snapshot()
        if self.store.plan(lease, n_tokens) is not None:
            self.check_refused(before)
        else:
            self.planned[lease] = n_tokens
            self.copies += [op for _, op in self.store.take_ops() if isinstance(op, CopyBlock)]

    def joined(self, lease: Lease | Refusal, before: object) -> None:
        if isinstance(lease, Refusal):
            self.check_refused(before)
        else:
            self.live.append(lease)
            self.admitted_tokens[lease] = len(lease.tokens)
            self.published[lease] = ()
            self.prompts.append(ids_of(lease))

    def left(self, lease: Lease) -> Lease:
        self.live.remove(lease)
        del self.published[lease]
        return lease

    def donated(self, lease: Lease) -> None:
        self.left(lease)
        if lease.written_tokens:
            self.indexed[lease.namespace].runs.add(ids_of(lease)[: lease.written_tokens])
        self.store.donate(lease)

    def write(self, lease: Lease, n_tokens: int) -> None:
        ids, pool = ids_of(lease), self.store.pool
        for position in range(lease.written_tokens, lease.written_tokens + n_tokens):
            block = lease.table[position // self.block_size]
            assert (pool.ref_count(block), pool.is_cached(block)) == (1, False), "others read it"
            self.arena.write(block, position, (lease.namespace, ids[: position + 1]))

    def commit(self, lease: Lease, n_tokens: int) -> None:
        written = lease.written_tokens + n_tokens
        whole_tokens = written // self.block_size * self.block_size
        if whole_tokens > lease.written_tokens // self.block_size * self.block_size:
            run = ids_of(lease)[:whole_tokens]
            self.indexed[lease.namespace].runs.add(run)
            self.published[lease] = run
        self.store.commit(lease, n_tokens)

    def note_evictions(self) -> None:
        if self.store.counters.evictions > self.evictions:
            self.evictions = self.store.counters.evictions
            for indexed in self.indexed.values():
                indexed.is_exact = False

    def is_exact(self, namespace: Namespace) -> bool:
        return self.indexed[namespace].is_exact

    def check_hit(self, namespace: Namespace, ids: Ids, hit_tokens: int) -> None:
        most, tokens = self.indexed[namespace].hit_tokens(ids), tokens_of(ids)
        longest = self.uncut(tokens, range(most + 1))
        assert hit_tokens <= longest
        assert hit_tokens == longest or not self.is_exact(namespace)

    def check_slots(
        self, namespace: Namespace, blocks: list[BlockId], ids: Ids, first: int = 0
    ) -> None:
        """`blocks` hold the tokens `ids` from position `first` on."""
        for position in range(first, len(ids)):
            block = blocks[(position - first) // self.block_size]
            assert self.arena.read(block, position) == (namespace, ids[: position + 1])

    def check_refused(self, before: object) -> None:
        if self.store.counters.evictions == self.evictions:
            assert self.snapshot() == before

    def snapshot(self) -> object:
        """All that can be seen of the store, but for the order in which it would evict."""
        return (
            replace(self.store.counters),
            self.store.pool.free_blocks(),
            [(n, path, tuple(node.blocks)) for n, path, node in walk(self.tree)],
            [(lease.written_tokens, tuple(lease.table)) for lease in self.live],
            len(self.store.leases),
        )


def ids_of(lease: Lease) -> Ids:
    return all_of(lease.tokens)


def test_the_store_behaves_like_the_naive_model() -> None:
    run_state_machine_as_test(
        KVStoreMachine,
        settings=settings(max_examples=examples(200), stateful_step_count=50, deadline=None),
    )
