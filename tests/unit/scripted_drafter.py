"""Drafts that a test chooses."""

from collections.abc import Sequence

from engine.core.drafting import DraftPolicy
from engine.drafts.proposer import Proposer
from engine.drafts.sources import Draft, Forced
from engine.drafts.suffix_index import RequestTexts
from engine.values.stats import DraftSource
from kvstore.tokens import Tokens
from kvstore.types import Namespace


class ScriptedDrafter:
    """Drafts the `script`, whatever was generated."""

    def __init__(self, script: Sequence[int], source: DraftSource = DraftSource.TREE) -> None:
        self.script = list(script)
        self.source = source

    def __call__(self, output: Sequence[int], most: int) -> Draft | None:
        tokens = self.script[len(output) : len(output) + most]
        return Draft(tuple(tokens), len(output), self.source) if tokens else None


class ScriptedPolicy(DraftPolicy):
    """Begins no proposers: a test sets those of its sequences."""

    def begin(
        self, texts: RequestTexts, namespace: Namespace, tokens: Tokens, forced: Forced | None
    ) -> Proposer | None:
        return None
