"""A drafter that drafts what a test says."""

from collections.abc import Sequence

from engine.drafts.sources import Draft
from engine.values.stats import DraftSource


class ScriptedDrafter:
    """Expects the `script`, whatever comes."""

    def __init__(self, script: Sequence[int], source: DraftSource = DraftSource.TREE) -> None:
        self.script = list(script)
        self.source = source
        self.n_generated = 0

    def accept(self, token_id: int) -> None:
        self.n_generated += 1

    def draft(self, most: int) -> Draft | None:
        tokens = self.script[self.n_generated : self.n_generated + most]
        return Draft(tuple(tokens), self.source, self.n_generated) if tokens else None
