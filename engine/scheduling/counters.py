"""What scheduler and admission count, since start. Counters only grow."""

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerCounters:
    computed_prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0  # for lack of blocks
    client_preemptions: int = 0  # so that another client's sequence could be admitted
    steps: int = 0
    rows_sat_out: int = 0  # rows that waited for a mask, a step each


@dataclass(slots=True)
class AdmissionCounters:
    """A sequence counts when it is first admitted."""

    queried_prompt_tokens: int = 0  # of those that may adopt
    cached_prompt_tokens: int = 0
