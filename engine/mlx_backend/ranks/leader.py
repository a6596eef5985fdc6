"""Rank 0's runner: sends each call to the other ranks, then makes it itself."""

from collections import deque
from collections.abc import Callable
from typing import TypeVar

from engine.core.step import Prefill, RunnerLost, StepMasks, StepPlan, StepResult, Verify
from engine.mlx_backend.ranks.group import RankLost, Ranks
from engine.mlx_backend.ranks.plan import Frame, encode_masks, encode_plan
from engine.mlx_backend.runner import MlxRunner

STEP_SECONDS, TOKEN_SECONDS = 30.0, 0.25
"""How long a step may take, and how much longer for each of its tokens. A rank that is lost without
a sign leaves the others in a collective that never returns.
"""

T = TypeVar("T")


class Leader:
    """Implements `ModelRunner` for a model of several ranks.

    An error of any rank leaves the ranks in unlike states, so that each is a RunnerLost.
    """

    def __init__(self, runner: MlxRunner, ranks: Ranks) -> None:
        self._runner = runner
        self._ranks = ranks
        self._limits = deque[float]()  # seconds that each submitted step may take

    def submit(self, plan: StepPlan) -> None:
        """See `ModelRunner.submit`."""
        limit = STEP_SECONDS + TOKEN_SECONDS * sum(map(_n_tokens, plan.rows))
        self._limits.append(limit)
        if len(self._limits) == 1:
            self._ranks.expect(limit, "a step")
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
        self._ranks.expect(self._limits[0] if self._limits else None, "a step")
        return result

    def rest(self) -> None:
        """See `Backend.rest`."""
        self._call(Frame.REST, self._runner.grow_ahead)

    def _call(
        self, frame: Frame, call: Callable[[], T], body: Callable[[], bytes] = lambda: b""
    ) -> T:
        """Have all ranks make a call. Raises RunnerLost."""
        try:
            self._ranks.send(frame, body())
            return call()
        except RankLost as lost:
            raise RunnerLost(str(lost)) from lost
        except Exception as error:
            raise RunnerLost(f"a step failed on rank 0: {type(error).__name__}: {error}") from error


def _n_tokens(row: object) -> int:
    match row:
        case Prefill():
            return len(row.tokens)
        case Verify():
            return 1 + len(row.draft)
        case _:
            return 1
