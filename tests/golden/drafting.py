"""Sequences that generate with drafts or without, several in one step, driven by hand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from engine.constraints.masks import mask_words
from engine.core.step import (
    NO_MASKS,
    Chunk,
    Masks,
    SampledToken,
    Sampling,
    StepMasks,
    StepPlan,
    StepResult,
)
from engine.mlx_backend.measuring.configs import VOCAB_SIZE
from engine.values.request import SamplingParams
from kvstore import invariants
from tests.golden.driving import Driver, Subject, compute

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
            prompt_tokens=tuple(prompt),
            banned_tokens=tuple(banned_tokens),
        )
        return Speaker(self.subject(prompt, sampling=sampling), len(prompt), masked)

    def turn(self, speakers: Sequence[Speaker], drafts: Drafts) -> StepResult:
        """One step of all: those with drafts verify them, others decode, or compute a chunk."""
        chunks = {speaker: _chunk(speaker, drafts) for speaker in speakers}
        counts = [
            (speaker.subject, len(chunk.tokens) if chunk else 1)
            for speaker, chunk in chunks.items()
        ]
        found = [chunk for chunk in chunks.values() if chunk]
        decodes = tuple(speaker.subject.id for speaker, chunk in chunks.items() if not chunk)
        plan = replace(self.plan(counts), chunks=tuple(found), decodes=decodes)
        result = compute(self.runner, plan, lambda: _masks(chunks))
        for speaker, chunk in chunks.items():
            self._commit(speaker, chunk, result.sampled.get(speaker.subject.id, ()))
        invariants.check(self.store)
        return result

    def late_turn(self, speaker: Speaker, drafts: Drafts) -> None:
        """Two steps: its masks are late in one, so it samples in the next, from what it kept."""
        chunk = _chunk(speaker, drafts)
        assert chunk is not None
        name = speaker.subject.id
        plan = replace(self.plan([(speaker.subject, len(chunk.tokens))]), chunks=(chunk,))
        late = compute(self.runner, plan, lambda: StepMasks(late=(name,)))
        assert late == StepResult({}, {})
        again = compute(self.runner, StepPlan(kept=(name,)), lambda: _masks({speaker: None}))
        self._commit(speaker, chunk, again.sampled[name])

    def _commit(
        self, speaker: Speaker, chunk: Chunk | None, sampled: Sequence[SampledToken]
    ) -> None:
        """What has been verified is the speaker's; the rest is computed again."""
        subject = speaker.subject
        n_own = len(chunk.tokens) - chunk.n_drafts if chunk else 1
        speaker.said += sampled
        subject.append([token.token_id for token in sampled])
        written_tokens = subject.lease.written_tokens + n_own + max(len(sampled) - 1, 0)
        self.store.publish(subject.lease, written_tokens)
        subject.lease.planned_tokens = written_tokens


def _chunk(speaker: Speaker, drafts: Drafts) -> Chunk | None:
    """What a speaker computes: None where it decodes."""
    subject, n_left = speaker.subject, speaker.subject.remaining_tokens
    if n_left > CHUNK_TOKENS:
        return subject.chunk(CHUNK_TOKENS, samples=False)
    chunk, drafted = subject.chunk(n_left, samples=True), tuple(drafts(speaker))
    if not drafted and n_left == 1:
        return None
    return replace(chunk, tokens=(*chunk.tokens, *drafted), n_drafts=len(drafted))


def _masks(chunks: dict[Speaker, Chunk | None]) -> StepMasks:
    """One for each draw of a speaker that is masked."""
    masks = [
        (speaker.subject.id, speaker.mask(len(speaker.said) + nth))
        for speaker, chunk in chunks.items()
        if speaker.masked and (chunk is None or chunk.samples)
        for nth in range(min(1 + (chunk.n_drafts if chunk else 0), speaker.most_masks))
    ]
    ids = [sequence_id for sequence_id, _ in masks]
    return StepMasks(ids, np.stack([mask for _, mask in masks]) if masks else NO_MASKS)
