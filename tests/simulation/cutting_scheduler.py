"""A scheduler that leaves room in some steps: what is computed in one step may take several."""

from random import Random

from engine.core.request import Limits
from engine.core.scheduler import Scheduler
from engine.core.sequence import LiveSequence
from engine.core.step_builder import StepBuilder
from engine.disk_cache.cache import DiskCache
from engine.drafts.proposer import LiveSpeculator
from engine.output.text import OutputFactory
from kvstore.store import KVStore
from tests.simulation.census import Census, Happening
from tests.simulation.model import NAMESPACES


class CuttingScheduler(Scheduler):
    """Cuts a share of all chunks shorter. Some schedulers cut none."""

    def __init__(
        self,
        random: Random,
        census: Census,
        store: KVStore,
        outputs: OutputFactory,
        limits: Limits,
        disk: DiskCache,
    ) -> None:
        super().__init__(
            store,
            outputs,
            limits,
            lambda: random.getrandbits(32),
            NAMESPACES,
            disk=disk,
            speculator=LiveSpeculator(store),
        )
        self._random = random
        self._census = census
        self._cut_share = random.choice([0.0, 0.0, 0.5])

    def _schedule(self, sequence: LiveSequence, n_tokens: int, builder: StepBuilder) -> None:
        if n_tokens > 1 and self._random.random() < self._cut_share:
            n_tokens = self._random.randrange(1, n_tokens)
        is_again = sequence.is_sampling and sequence.remaining_tokens > 1
        self._census[Happening.AGAIN] += is_again
        self._census[Happening.AGAIN_IN_PARTS] += is_again and n_tokens < sequence.remaining_tokens
        super()._schedule(sequence, n_tokens, builder)
