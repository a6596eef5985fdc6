"""Sequences that generate with drafts or without, several in one step, driven by hand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from engine.core.step import (
    NO_MASKS,
    Decode,
    Late,
    Masks,
    Prefill,
    Resample,
    Row,
    RowResult,
    Sampled,
    SampledToken,
    Sampling,
    StepMasks,
    StepPlan,
    StepResult,
    Verified,
    Verify,
)
from engine.grammar.stage import mask_words
from engine.values.request import SamplingParams
from engine.values.tokens import pack
from kvstore import invariants
from measuring.random_checkpoint import VOCAB_SIZE
from tests.golden.driving import Driver, Subject, compute
from tests.unit.engine_harness import n_tokens

Drafts = Callable[["Speaker"], Sequence[int]]
"""What a speaker's next tokens may be."""

CHUNK_TOKENS = 7
"""Of a prompt, in one step."""


@dataclass(eq=False)
class Speaker:
    """A sequence that generates. `said` is what it has sampled, `masked`: whether masks rule
    tokens out, others at each of its output's positions; so many masks in a step at most.
    """

    subject: Subject
    prompt_tokens: int
    masked: bool = False
    most_masks: int = 100
    said: list[SampledToken] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.said]

    def mask(self, output_index: int) -> Masks:
        """Half of all tokens."""
        generator = np.random.default_rng([self.prompt_tokens, output_index])
        bounds = np.iinfo(np.int32)
        return generator.integers(bounds.min, bounds.max, mask_words(VOCAB_SIZE), dtype=np.int32)


class DraftingDriver(Driver):
    """Lets speakers generate in common steps."""

    def speaker(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        banned_tokens: Sequence[int] = (),
        masked: bool = False,
    ) -> Speaker:
        sampling = Sampling(
            params,
            params.seed or 0,
            prompt_tokens=pack(prompt),
            banned_tokens=tuple(banned_tokens),
        )
        return Speaker(self.subject(prompt, sampling=sampling), len(prompt), masked)

    def turn(self, speakers: Sequence[Speaker], drafts: Drafts) -> StepResult:
        """One step of all: those with drafts verify them, others decode, or prefill."""
        rows = {speaker: _row(speaker, drafts) for speaker in speakers}
        counts = [(speaker.subject, n_tokens(row)) for speaker, row in rows.items()]
        plan = replace(self.plan(counts), rows=list(rows.values()))
        result = compute(self.runner, plan, _masks(rows))
        for (speaker, row), own in zip(rows.items(), result.rows, strict=True):
            self._commit(speaker, row, own)
        invariants.check(self.store)
        return result

    def late_turn(self, speaker: Speaker, drafts: Drafts) -> None:
        """Two steps: its masks are late in one, so it samples in the next, from saved logits."""
        row = _row(speaker, drafts)
        assert isinstance(row, Verify)
        name = speaker.subject.id
        plan = replace(self.plan([(speaker.subject, n_tokens(row))]), rows=[row])
        late = compute(self.runner, plan, StepMasks(late=(name,)))
        assert late == StepResult((Late(),))
        resample = Resample(name)
        [again] = compute(self.runner, StepPlan(rows=[resample]), _masks({speaker: resample})).rows
        self._commit(speaker, Verify(name, row.start, row.token, row.draft), again)

    def _commit(self, speaker: Speaker, row: Row, result: RowResult) -> None:
        """The sampled tokens are the speaker's; a rejected draft is forgotten."""
        tokens = tuple[SampledToken, ...]()
        if isinstance(result, Sampled):
            tokens = (result.token,)
        elif isinstance(result, Verified):
            tokens = result.tokens
        speaker.said += tokens
        speaker.subject.append([token.token_id for token in tokens])
        n_accepted = len(tokens) if isinstance(row, Verify) else n_tokens(row)
        self.store.commit(speaker.subject.lease, n_tokens(row), n_accepted)


def _row(speaker: Speaker, drafts: Drafts) -> Row:
    """What a speaker computes."""
    subject, n_left = speaker.subject, speaker.subject.remaining_tokens
    if n_left > CHUNK_TOKENS:
        return subject.prefill(CHUNK_TOKENS, samples=False)
    prefill = subject.prefill(n_left, samples=True)
    if n_left > 1 or not speaker.said:
        return prefill
    if drafted := tuple(drafts(speaker)):
        return Verify(subject.id, prefill.start, prefill.tokens[0], drafted)
    return Decode(subject.id)


def _masks(rows: dict[Speaker, Row]) -> StepMasks:
    """One for each draw of a speaker that is masked."""
    masks = [
        (speaker.subject.id, speaker.mask(len(speaker.said) + nth))
        for speaker, row in rows.items()
        if speaker.masked and not (isinstance(row, Prefill) and not row.samples)
        for nth in range(min(n_tokens(row) if isinstance(row, Verify) else 1, speaker.most_masks))
    ]
    ids = [sequence_id for sequence_id, _ in masks]
    return StepMasks(ids, np.stack([mask for _, mask in masks]) if masks else NO_MASKS)
