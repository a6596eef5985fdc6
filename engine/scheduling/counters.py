"""What scheduler and admission count, since start. Counters only grow."""

from dataclasses import dataclass, field

from engine.types.draft import DraftSource
from engine.types.statistics import DraftCounts


def _no_drafts() -> dict[DraftSource, DraftCounts]:
    return dict.fromkeys(DraftSource, DraftCounts())


@dataclass(slots=True)
class SchedulerCounters:
    computed_prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0  # for lack of blocks
    client_preemptions: int = 0  # so that another client's sequence could be admitted
    steps: int = 0
    rows_sat_out: int = 0  # rows that waited for a mask, a step each
    drafts: dict[DraftSource, DraftCounts] = field(default_factory=_no_drafts)

    def count_draft(self, source: DraftSource, drafted_tokens: int, accepted_tokens: int) -> None:
        """A step has verified a draft."""
        self.drafts[source] = self.drafts[source].plus(drafted_tokens, accepted_tokens)


@dataclass(slots=True)
class AdmissionCounters:
    """A sequence counts when it is first admitted."""

    queried_prompt_tokens: int = 0  # of those that may adopt
    cached_prompt_tokens: int = 0
