"""What came of serving one case."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    SERVED = "served"
    REFUSED = "refused"  # at load, with a reason
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one case was served.

    `error`: the largest relative error of a token's logits. `reason`: why it is not served.
    `compiled`: "yes" if its decode steps are compiled, otherwise why not; "" if it was refused.
    """

    name: str
    verdict: Verdict
    keeps: str = ""
    batching: str = ""
    error: float = 0.0
    reason: str = ""
    compiled: str = ""
