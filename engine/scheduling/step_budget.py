"""How many prompt tokens a step has time for beside its decodes."""

import math

from engine.scheduling.costs import StepCosts
from engine.step.plan import (
    VERIFICATION,
    StepWork,
    chunk_beginning,
    chunk_work,
    draft_work,
)

_MARGIN_DEVIATIONS = 2.0
"""Standard deviations by which a step is planned to end before its limit."""

_LEAST_SHARE = 0.25
"""What the tokens of a step's first chunk may take, of what all else in the step takes."""

_MOVED_SHARE = 0.5
"""What moving bytes from and to the disk may take, of what all else in the step does: so that a gap
between two tokens grows by half at most."""


class StepBudget:
    """The time of one step, while it is planned: first its decodes, then chunks of prompts.

    Beside decodes all is to end within `stretch` times what a step of decodes alone takes, with a
    margin for errors of prediction: of normal ones 2% go beyond it. So a slow model behaves as a
    fast one does in slow motion. Without decodes nobody waits for a next token, and time has no
    limit.

    So that every prompt goes on, the tokens of a step's first chunk are one at least, and may take
    a quarter of what decodes and a forward do, whatever is left, or as long as it takes to gather
    what lies before them: else a long prompt's time would be spent on gathering it again.
    """

    def __init__(self, costs: StepCosts, stretch: float, batch_rows: int = 0) -> None:
        """`stretch` is at least 1 and may be infinite. The step of decodes that counts has
        `batch_rows`, if those are more than the decodes: who waits for a prompt will decode, too,
        and where many wait for few, they wait for longer.
        """
        self._costs = costs
        self._stretch = stretch
        self._batch_rows = batch_rows
        self._n_chunks = 0
        self._decode_rows = 0
        self._decode_keys = 0
        self._chunks_and_drafts = StepWork()
        self._moved_seconds = 0.0

    @property
    def moving_seconds(self) -> float:
        """How long bytes may be moved beside what has been planned; infinite without decodes."""
        if self._decode_rows == 0:
            return math.inf
        work_seconds = self._costs.seconds(self.work)
        most_seconds = min(self._aim_seconds - work_seconds, _MOVED_SHARE * work_seconds)
        return max(most_seconds - self._moved_seconds, 0.0)

    @property
    def _spent_seconds(self) -> float:
        return self._costs.seconds(self.work) + self._moved_seconds

    @property
    def work(self) -> StepWork:
        """What has been planned."""
        return self._chunks_and_drafts.plus(self.decodes)

    @property
    def decodes(self) -> StepWork:
        """What of it is decodes."""
        return StepWork(min(self._decode_rows, 1), self._decode_rows, self._decode_keys)

    @property
    def left_seconds(self) -> float:
        """What may still be planned beside the decodes."""
        return max(self._aim_seconds - self._spent_seconds, 0.0)

    def decode(self, start: int) -> None:
        """One token of a sequence, at position `start`, is in the step."""
        self._decode_rows += 1
        self._decode_keys += start + 1

    def chunk(self, start: int, n_tokens: int) -> None:
        """Positions [start, start + n_tokens) of a prompt are in the step."""
        self._n_chunks += 1
        self._chunks_and_drafts = self._chunks_and_drafts.plus(chunk_work(start, n_tokens))

    def draft(self, start: int, n_tokens: int) -> None:
        """The sequence that decodes the token at position `start` has a draft of so many tokens."""
        if self._chunks_and_drafts.verifications == 0:
            self._chunks_and_drafts = self._chunks_and_drafts.plus(VERIFICATION)
        self._chunks_and_drafts = self._chunks_and_drafts.plus(draft_work(start, n_tokens))

    def move(self, seconds: float) -> None:
        """Bytes are filled in that are predicted to take so long."""
        self._moved_seconds += seconds

    def allow(self, start: int, wanted: int) -> int:
        """How many of `wanted` tokens, at least one, from position `start` of a prompt may join.

        0 only where another chunk is in the step: what fits takes less time than to begin it does.
        """
        if self._decode_rows == 0 or math.isinf(self._stretch):
            return wanted
        begin_seconds = self._costs.seconds(chunk_beginning(start))
        spent_seconds = self._spent_seconds
        left_seconds = self._aim_seconds - spent_seconds - begin_seconds
        if self._n_chunks == 0:
            gather_seconds = self._costs.seconds(StepWork(gathered_keys=start))
            with_forward = spent_seconds + begin_seconds - gather_seconds
            seconds = max(left_seconds, _LEAST_SHARE * with_forward, gather_seconds)
            return max(_usual(self._costs.chunk_tokens(start, seconds, wanted), wanted), 1)
        allowed = _usual(self._costs.chunk_tokens(start, max(left_seconds, 0.0), wanted), wanted)
        return allowed if allowed == wanted or left_seconds >= begin_seconds else 0

    @property
    def _aim_seconds(self) -> float:
        if math.isinf(self._stretch):
            return math.inf
        rows = max(self._decode_rows, self._batch_rows)
        decodes = StepWork(forwards=1, decode_rows=rows, decode_keys=self._decode_keys)
        limit_seconds = self._stretch * self._costs.seconds(decodes)
        return limit_seconds / (1 + _MARGIN_DEVIATIONS * self._costs.spread)


def _usual(n_tokens: int, wanted: int) -> int:
    """All that is wanted, where that fits; else one of eight lengths in each octave.

    MLX finds its buffers again by their size, and memory that is touched for the first time costs a
    page fault for each 4 KiB: a quarter of a step's time, while each chunk had a length of its own.
    """
    if n_tokens == wanted:
        return n_tokens
    step = 1 << max(0, n_tokens.bit_length() - 4)
    return n_tokens // step * step
