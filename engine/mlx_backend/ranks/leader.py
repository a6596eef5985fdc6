"""Rank 0's runner: sends each call to the other ranks, then makes it itself."""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from engine.core.step import Prefill, Row, RunnerLost, StepMasks, StepPlan, StepResult, Verify
from engine.mlx_backend.ranks.link import RankLost
from engine.mlx_backend.ranks.plan import Frame, encode_ids, encode_masks, encode_plan
from engine.mlx_backend.runner import MlxRunner
from kvstore.types import BlockId, SlotId

STEP_SECONDS, TOKEN_SECONDS = 30.0, 0.25
"""How long a step may take, and how much longer for each of its tokens. A rank that is lost without
a sign leaves the others in a collective that never returns.
"""

T = TypeVar("T")


class Leader:
    """Stands for the `MlxRunner` of a model of several ranks, on rank 0.

    An error of any rank leaves the ranks in unlike states, so that each is a RunnerLost.
    """

    def __init__(
        self,
        runner: MlxRunner,
        send: Callable[[Frame, bytes], None],
        expect: Callable[[float | None], None],
    ) -> None:
        """`send` sends a frame to all other ranks, or raises RankLost. `expect` is called with the
        seconds within which it must be called again; None: no limit.
        """
        self._runner = runner
        self._send = send
        self._expect = expect
        self._limits = deque[float]()  # seconds that each submitted step may take

    def submit(self, plan: StepPlan) -> None:
        """See `ModelRunner.submit`."""
        self._limits.append(STEP_SECONDS + TOKEN_SECONDS * sum(map(_n_tokens, plan.rows)))
        if len(self._limits) == 1:
            self._expect(self._limits[0])
        self._call(Frame.SUBMIT, lambda: self._runner.submit(plan), lambda: encode_plan(plan))

    def launch(self) -> None:
        """See `ModelRunner.launch`."""
        self._call(Frame.LAUNCH, self._runner.launch)

    def draw(self, masks: StepMasks) -> None:
        """See `ModelRunner.draw`."""
        self._call(Frame.DRAW, lambda: self._runner.draw(masks), lambda: encode_masks(masks))

    def collect(self) -> StepResult:
        """See `ModelRunner.collect`."""
        result = self._call(Frame.COLLECT, self._runner.collect)
        self._limits.popleft()
        self._expect(self._limits[0] if self._limits else None)
        return result

    def resize_ahead(self) -> None:
        """See `MlxRunner.resize_ahead`."""
        self._call(Frame.RESIZE, self._runner.resize_ahead)

    def shrink(self, free: Collection[BlockId]) -> None:
        """See `MlxRunner.shrink`."""
        self._call(
            Frame.SHRINK, lambda: self._runner.shrink(free), lambda: encode_ids(sorted(free))
        )

    def give_back(self, blocks: Sequence[BlockId], slots: Sequence[Sequence[SlotId]]) -> None:
        """See `MlxRunner.give_back`."""
        self._call(
            Frame.GIVE_BACK,
            lambda: self._runner.give_back(blocks, slots),
            lambda: encode_ids(blocks, *slots),
        )

    def _call(
        self, frame: Frame, call: Callable[[], T], body: Callable[[], bytes] = lambda: b""
    ) -> T:
        """Have all ranks make a call. Raises RunnerLost."""
        try:
            self._send(frame, body())
            return call()
        except RankLost as lost:
            raise RunnerLost(str(lost)) from lost
        except Exception as error:
            raise RunnerLost(f"a step failed on rank 0: {type(error).__name__}: {error}") from error


def _n_tokens(row: Row) -> int:
    match row:
        case Prefill():
            return len(row.tokens)
        case Verify():
            return 1 + len(row.draft)
        case _:
            return 1
