"""How much of later turns' prompts is cached, by the policy that a router deals them out with."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from load_tests.client import Target
from load_tests.replicas.fleet import FAILOVER, MODEL, Replica, replicas, routed, urls
from load_tests.scenarios.kinds import Load
from load_tests.scenarios.load import play
from load_tests.scenarios.workloads import build

POLICIES = ("consistent_hash", "cache_aware", "round_robin")
ALONE = "one daemon alone"

CHATS = Load(
    description="conversations of six turns, four at a time",
    concurrency=4,
    conversations=4,
    turns=6,
    system_prompts=1,
    system_words=60,
    user_words=15,
    output_tokens=48,
)


@dataclass(frozen=True, slots=True)
class Shared:
    """One run. Tokens are those of prompts, first turns left out."""

    policy: str
    prompt_tokens: int
    cached_tokens: int
    dealt_tokens: tuple[int, ...]  # of all turns, to each daemon

    @property
    def share(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    @property
    def busier(self) -> float:
        """The share of all tokens that the busier daemon was dealt."""
        return max(self.dealt_tokens) / sum(self.dealt_tokens)


def measure(policy: str, seed: int) -> Shared:
    """Play the conversations against two fresh daemons behind a router, or against one without.

    Raises TargetError.
    """
    if policy == ALONE:
        with replicas(1) as fleet:
            return _play(policy, seed, fleet, Target(f"{fleet[0].url}/v1", MODEL))
    with replicas(2) as fleet, routed(policy, urls(fleet), *FAILOVER) as target:
        return _play(policy, seed, fleet, target)


def _play(policy: str, seed: int, fleet: Sequence[Replica], target: Target) -> Shared:
    run = asyncio.run(play(build(CHATS, seed), target))
    later = [answer for answer in run.answers if answer.turn > 0]
    return Shared(
        policy,
        sum(answer.prompt_tokens for answer in later),
        sum(answer.cached_tokens for answer in later),
        tuple(replica.prompt_tokens() for replica in fleet),
    )
