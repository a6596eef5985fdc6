"""What stands in the tree is what the model computes of its tokens, whoever brought it there."""

from collections.abc import Callable, Iterator, Sequence

from engine.core.sequence import LiveSequence
from kvstore.node import Node
from kvstore.ops import RollBackState
from kvstore.recurrent import RecurrentGroup, RoundedGroup
from kvstore.store import KVStore
from kvstore.tokens import TOKEN_BYTES, unpacked
from kvstore.tree import RadixTree
from kvstore.types import BlockId, SlotId
from kvstore.window import WindowGroup
from tests.simulation.fake_runner import FakeRunner
from tests.simulation.model import ROOT, chain, fingerprint


class WatchedTree(RadixTree):
    """Reports each node that has grown, with the index of its first new block."""

    report: Callable[[Node, int], None] | None = None

    def _grow(self, node: Node, packed: bytes, blocks: Sequence[BlockId]) -> None:
        super()._grow(node, packed, blocks)
        grown = self._node_of[blocks[0]]
        if self.report is not None:
            self.report(grown, grown.blocks.index(blocks[0]))


class ContentCheck:
    """Checks each block once, when it is indexed."""

    def __init__(self, store: KVStore, runner: FakeRunner) -> None:
        self._store = store
        self._runner = runner
        self._block_size = store.block_size
        if isinstance(store.tree, WatchedTree):
            store.tree.report = self._check_grown

    def _check_grown(self, node: Node, first: int) -> None:
        kv = self._above(node, first)
        tokens = unpacked(bytes(node.packed[first * self._block_size * TOKEN_BYTES :]))
        for place, token_id in enumerate(tokens, start=first * self._block_size):
            index, slot = divmod(place, self._block_size)
            kv = chain(kv, token_id, node.namespace.adapter)
            assert self._runner.kv(node.blocks[index], slot) == kv, "a block of other tokens"

    def check_attached(self) -> None:
        """What is attached to a block in the tree is what its own KV says of so many tokens."""
        unfinished = {op.slot for _, op in self._store.ops if isinstance(op, RollBackState)}
        for block, n_tokens in self._blocks():
            for index, group in enumerate(self._store.groups):
                if isinstance(group, WindowGroup):
                    self._check_window(index, group, block, n_tokens)
                elif isinstance(group, RecurrentGroup):
                    self._check_states(group, block, n_tokens, unfinished)

    def check_adopted(self, sequence: LiveSequence) -> None:
        """All that a sequence was said to find was there."""
        if sequence.lease is None:
            return
        kv = ROOT
        for position in range(sequence.cached_tokens + sequence.forked_tokens):
            index, slot = divmod(position, self._block_size)
            kv = chain(kv, sequence.tokens[position], fingerprint(sequence.request.adapter))
            assert self._runner.kv(sequence.lease.table[index], slot) == kv, "cached, and not there"

    def _above(self, node: Node, first: int) -> int:
        if first:
            return self._runner.kv(node.blocks[first - 1], self._block_size - 1)
        if node.parent is None or not node.parent.blocks:
            return ROOT
        return self._runner.kv(node.parent.blocks[-1], self._block_size - 1)

    def _blocks(self) -> Iterator[tuple[BlockId, int]]:
        for node in () if self._store.tree is None else self._store.tree.nodes():
            n_tokens = len(node.packed) // TOKEN_BYTES
            for block in node.blocks:
                yield block, min(n_tokens, self._block_size)
                n_tokens -= self._block_size

    def _check_window(self, index: int, group: WindowGroup, block: BlockId, n_tokens: int) -> None:
        slot = group.attached(block, n_tokens)
        if slot is not None:
            for place in range(n_tokens):
                kv = self._runner.kv(block, place)
                assert self._runner.window(index, slot, place) == kv, "another's window is attached"

    def _check_states(
        self, group: RecurrentGroup, block: BlockId, n_tokens: int, unfinished: set[SlotId]
    ) -> None:
        for stop, slot in group.slots.attached_to(block).items():
            assert stop <= n_tokens, "a state behind its own tokens is attached"
            if slot not in unfinished:
                kv = self._runner.kv(block, stop - 1)
                state = self._runner.state(slot)
                assert state.kv == kv, "another's state is attached"
                if isinstance(group, RoundedGroup):
                    assert state.rounded_at == kv, "a state that was not rounded is attached"
