"""A store without a model, a disk cache over it, and a tier that does what a test says."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from engine.core.budget import StepBudget, StepCosts
from engine.disk_cache.cache import DiskCache
from engine.disk_cache.loader import LoadAttempt, LoadOutcome, LoadRules, Prompt
from engine.disk_cache.writer import WriteRules
from kvstore import invariants
from kvstore.disk.catalog import Reservation
from kvstore.disk.types import Buffer, Entry, Fault, ReadFailure
from kvstore.ops import FillBlock, FillState, Parts, ReadBlock
from kvstore.pool import BlockPool
from kvstore.slots import Group
from kvstore.store import KVStore
from kvstore.tokens import Digest, Tokens
from kvstore.tree import RadixTree
from kvstore.types import Namespace
from tests.simulation.fake_store import FakeStore
from tests.unit.kv_helpers import BLOCK, NS, packed

BLOCK_BYTES, WINDOW_BYTES, STATE_BYTES = 16, 8, 4
IDLE = 1.0
WRITE_RULES = WriteRules(least_tokens=2 * BLOCK, idle_seconds=IDLE)
LOAD_RULES = LoadRules(least_tokens=2 * BLOCK, worth=1e9)

Fill = FillBlock | FillState


@dataclass(slots=True)
class Shelf(FakeStore):
    """Loses nothing, and reads when it is told to."""

    written: list[Reservation] = field(default_factory=list)
    touched: list[Digest] = field(default_factory=list)

    def write(self, reservation: Reservation, parts: Sequence[Buffer | None]) -> bool:
        is_taken = super(Shelf, self).write(reservation, parts)
        if is_taken:
            self.written.append(reservation)
        return is_taken

    def touch(self, names: Sequence[Digest]) -> None:
        self.touched += names

    def break_off(self) -> None:
        """The first reading that is not over cannot go on."""
        ticket = next(ticket for ticket in self.tickets if not ticket.is_over)
        ticket.is_over = True
        ticket.deliver_found(ReadFailure(ticket.done, Fault.CHECKSUM))

    def change(self, name: Digest, parts: Parts) -> None:
        stored = self.records[name]
        self.records[name] = replace(stored, entry=Entry(name, stored.entry.n_tokens, parts))


class TransferBudget(StepBudget):
    """A step with time for transfers alone. `added_seconds`: what was added of these."""

    def __init__(self, seconds: float) -> None:
        super().__init__(StepCosts(), math.inf)
        self._seconds = seconds
        self.added_seconds = 0.0

    @property
    def transfer_seconds(self) -> float:
        return self._seconds

    def add_transfer(self, seconds: float) -> None:
        self.added_seconds += seconds


class Desk:
    """Nothing is computed. `step` carries out what the disk cache has planned."""

    def __init__(
        self,
        shelf: Shelf | None = None,
        write_rules: WriteRules = WRITE_RULES,
        load_rules: LoadRules = LOAD_RULES,
        groups: Sequence[Group] = (),
        n_blocks: int = 64,
        n_windows: int = 0,
        shutdown_seconds: float = 10.0,
        step_bytes: float = math.inf,
    ) -> None:
        pool = BlockPool(n_blocks)
        self.now = 100.0
        self.shelf = shelf or Shelf()
        self.step_seconds = step_bytes
        if step_bytes < math.inf:
            self.shelf.read_rate = 1.0  # so that a second is a byte, until steps tell otherwise
        self.store = KVStore(pool, RadixTree(pool, BLOCK, hashes_blocks=True), BLOCK, groups)
        self.posted = deque[Callable[[], None]]()
        self.disk = DiskCache(
            self.shelf,
            self.store,
            (BLOCK_BYTES, *[WINDOW_BYTES] * n_windows, STATE_BYTES),
            0,
            self.posted.append,
            write_rules,
            load_rules,
            shutdown_seconds,
            clock=lambda: self.now,
        )
        self._numbers = count(1)

    def step(self) -> tuple[list[Fill], list[ReadBlock]]:
        """What one step fills in and reads; it is carried out."""
        number, fills, reads = self.plan()
        self.disk.commit(number, [contents(read) for read in reads])
        invariants.check(self.store)
        return fills, reads

    def plan(self) -> tuple[int, list[Fill], list[ReadBlock]]:
        """A step in flight: its number and what it fills in and reads."""
        self.handle()
        number = next(self._numbers)
        self.budget = TransferBudget(self.step_seconds)
        self.disk.add_loads(number, self.budget)
        self.disk.add_reads(number, TransferBudget(self.step_seconds))
        ops = [op for _, op in self.store.take_ops()]
        fills = [op for op in ops if isinstance(op, FillBlock | FillState)]
        return number, fills, [op for op in ops if isinstance(op, ReadBlock)]

    def handle(self) -> None:
        """What readers have posted."""
        while self.posted:
            self.posted.popleft()()

    def write(self) -> list[ReadBlock]:
        """Steps until nothing more is read."""
        found = list[ReadBlock]()
        while reads := self.step()[1]:
            found += reads
        return found

    def wait(self, seconds: float = IDLE) -> None:
        """As the loop, which asks how long it may sleep."""
        self.disk.wait_seconds()
        self.now += seconds

    def load(
        self,
        tokens: Sequence[int],
        namespace: Namespace = NS,
        spare_blocks: int = 0,
        compute_seconds: float = 1.0,
    ) -> bool:
        found = self.ask(tokens, LoadAttempt(), namespace, spare_blocks, compute_seconds)
        return found is LoadOutcome.STARTED

    def ask(
        self,
        tokens: Sequence[int],
        attempt: LoadAttempt,
        namespace: Namespace = NS,
        spare_blocks: int = 0,
        compute_seconds: float = 1.0,
    ) -> LoadOutcome:
        prompt = Prompt(
            namespace, Tokens(tokens), self.disk.block_hashes(namespace, packed(tokens))
        )
        return self.disk.load(prompt, attempt, spare_blocks, lambda start, n: compute_seconds)

    def has(self, tokens: Sequence[int], namespace: Namespace = NS) -> int:
        """How many of the tokens are on the shelf, as whole blocks."""
        hashes = self.disk.block_hashes(namespace, packed([*tokens, 0]))
        return self.shelf.known(hashes) * BLOCK

    def cached(self, tokens: Sequence[int]) -> int:
        """How many of a prompt's tokens could be adopted in memory."""
        return self.store.probe(NS, Tokens([*tokens, 0]))


def contents(read: ReadBlock) -> Parts:
    """What a step reads: bytes that tell of the block, and of the slots."""
    windows = (None if slot is None else bytes([slot]) * WINDOW_BYTES for slot in read.windows)
    state = None if read.state is None else bytes([read.state]) * STATE_BYTES
    return (bytes([read.block % 256]) * BLOCK_BYTES, *windows, state)


def filled(ops: Sequence[Fill]) -> list[bytes]:
    """What goes into blocks, in order."""
    return [bytes(op.data) for op in ops if isinstance(op, FillBlock) and op.group is None]
