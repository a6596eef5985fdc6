"""A scheduler that leaves room in some steps: what is computed in one step may take several."""

from random import Random

from engine.core.drafting import DraftPolicy
from engine.core.images import ImageFeatures
from engine.core.metrics import Metrics
from engine.core.scheduler import Scheduler
from engine.core.sequence import LiveSequence, Step
from engine.core.step import Limits, StepResult, Verify
from engine.disk_cache.cache import DiskCache
from engine.output.text import NewOutput
from engine.values.stats import ImageStats
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
        new_output: NewOutput,
        limits: Limits,
        metrics: Metrics,
        disk: DiskCache | None,
    ) -> None:
        super().__init__(
            store,
            new_output,
            limits,
            lambda: random.getrandbits(32),
            metrics,
            NAMESPACES,
            disk=disk,
            drafts=DraftPolicy(store),
        )
        self._random = random
        self._census = census
        self._cut_share = random.choice([0.0, 0.0, 0.5])
        self._image_stats = ImageStats(0, 0, 0, 0)

    def plan(self) -> Step | None:
        step = super().plan()
        has_others = self.sequences.n_foreground > 0  # planning ends those that have failed
        rows = () if step is None else step.rows
        n_background = sum(planned.sequence.request.is_background for planned in rows)
        assert not (has_others and n_background), "computed in the background while others wait"
        self._census[Happening.BACKGROUND] += n_background
        return step

    def commit(self, step: Step, result: StepResult) -> None:
        readmitted = [
            planned
            for planned in step.rows
            if planned.sequence.lease is not None and not planned.is_current
        ]
        self._census[Happening.READMITTED] += len(readmitted)
        super().commit(step, result)
        if self.images is not None:
            self._count_images(step, result, self.images)

    def _count_images(self, step: Step, result: StepResult, images: ImageFeatures) -> None:
        """Count what a step that was computed had to do with images."""
        census, stats = self._census, images.stats()
        census[Happening.IMAGE_ENCODED] += stats.encoded - self._image_stats.encoded
        census[Happening.IMAGE_REUSED] += stats.reused - self._image_stats.reused
        self._image_stats = stats
        census[Happening.IMAGE_IN_PARTS] += sum(work.first_stage > 0 for work in step.plan.encode)
        census[Happening.IMAGE_FORGOTTEN] += len(step.plan.forget)
        census[Happening.IMAGE_FAILED] += len(result.not_encoded)

    def _add_prefill(self, sequence: LiveSequence, n_tokens: int, step: Step) -> bool:
        if n_tokens > 1 and self._random.random() < self._cut_share:
            n_tokens = self._random.randrange(1, n_tokens)
        is_again = isinstance(sequence.pending, Verify)  # whose rejected draft was rolled back
        self._census[Happening.AGAIN] += is_again
        self._census[Happening.AGAIN_IN_PARTS] += is_again and n_tokens < sequence.unplanned_tokens
        return super()._add_prefill(sequence, n_tokens, step)
