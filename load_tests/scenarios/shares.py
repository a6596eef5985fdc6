"""The first token of a prompt, of which a share has been seen before."""

import random
from dataclasses import dataclass

from load_tests.client import Listener, Target, TargetError, connected, limited, message
from load_tests.lexicon import WORDS
from load_tests.scenarios.kinds import Shares


@dataclass(frozen=True, slots=True)
class Probe:
    """One prompt. `share` of its words began the prompt that was sent before."""

    share: float
    prompt_tokens: int
    cached_tokens: int  # as the server tells them; 0 where it does not
    first_token_seconds: float


@dataclass(frozen=True, slots=True)
class Probed:
    """The probes, in the scenario's order."""

    probes: tuple[Probe, ...]

    @property
    def headline(self) -> str:
        """For a line of progress."""
        seconds = ", ".join(f"{probe.first_token_seconds:.2f}" for probe in self.probes)
        return f"first text after {seconds} s"


async def play_shares(scenario: Shares, seed: int, target: Target) -> Probed:
    """Send one prompt, then for each share another that begins with so much of it.

    One at a time. Raises TargetError.
    """
    rng = random.Random(seed)
    seen = rng.choices(WORDS, k=scenario.prompt_words)
    probes = []
    async with limited(target), connected(target) as asker:
        await asker.ask([_said(seen)], scenario.output_tokens, Listener())
        for share in scenario.shares:
            n_seen = round(share * scenario.prompt_words)
            words = seen[:n_seen] + rng.choices(WORDS, k=scenario.prompt_words - n_seen)
            listener = Listener()
            await asker.ask([_said(words)], scenario.output_tokens, listener)
            probes.append(_probe(share, listener))
    return Probed(tuple(probes))


def _said(words: list[str]) -> dict[str, str]:
    return message("user", "".join(f"{word} " for word in words))


def _probe(share: float, listener: Listener) -> Probe:
    if not listener.heard:
        raise TargetError("a prompt was not answered")
    details = listener.usage.get("prompt_tokens_details") or {}
    return Probe(
        share=share,
        prompt_tokens=listener.usage["prompt_tokens"],
        cached_tokens=details.get("cached_tokens", 0),
        first_token_seconds=listener.heard[0] - listener.started,
    )
