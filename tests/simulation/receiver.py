"""What somebody who sent a request must get, and gets."""

from collections import defaultdict
from dataclasses import dataclass, field

from engine.core.sequence import LiveSequence
from engine.values.output import FinishReason, OutputEvent, TokenLogprob, Usage
from engine.values.request import Request
from tests.simulation.expected import Expected
from tests.simulation.model import positions_of


@dataclass(slots=True)
class Receiver:
    """What somebody who sent a request has received so far, by index."""

    request: Request
    sequences: list[LiveSequence]
    expected: list[Expected]
    token_ids: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    text: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    scored: dict[int, list[TokenLogprob | None]] = field(default_factory=lambda: defaultdict(list))
    admissions: dict[int, Usage] = field(default_factory=dict)
    ends: dict[int, OutputEvent] = field(default_factory=dict)

    def receive(self, event: OutputEvent) -> None:
        assert event.index not in self.ends, "an event after the terminal one"
        if event.admission is not None:
            assert event.index not in self.admissions, "admitted for the first time again"
            self.admissions[event.index] = event.admission
        assert event.index in self.admissions or not event.token_ids, "a token before admission"
        self.token_ids[event.index] += event.token_ids
        self.text[event.index] += event.text
        if event.prompt_logprobs:  # of the prompt of all
            for index in range(self.request.n):
                self.scored[index] += event.prompt_logprobs
        assert not (event.token_ids and event.prompt_logprobs), "tokens with the prompt's logprobs"
        if event.finish_reason is not None:
            self.ends[event.index] = event
            self._check_end(event)

    def _check_end(self, event: OutputEvent) -> None:
        expected = self.expected[event.index]
        token_ids, text = self.token_ids[event.index], self.text[event.index]
        assert token_ids == expected.token_ids[: len(token_ids)], "other tokens than when alone"
        assert expected.text.startswith(text), "other text than when alone"
        usage = event.usage
        assert usage is not None
        assert usage.prompt_tokens == len(self.request.prompt)
        assert usage.completion_tokens == len(token_ids)
        assert 0 <= usage.cached_tokens < usage.prompt_tokens
        assert 0 <= usage.accepted_draft_tokens <= max(usage.completion_tokens - 1, 0)
        assert usage.rejected_draft_tokens >= 0
        admission = self.admissions.get(event.index, Usage(len(self.request.prompt), 0, 0))
        assert (admission.prompt_tokens, admission.cached_tokens, 0) == (
            usage.prompt_tokens,
            usage.cached_tokens,
            admission.completion_tokens,
        )
        if event.finish_reason in {FinishReason.STOP, FinishReason.LENGTH}:
            assert event.finish_reason is expected.finish_reason
            assert event.pooled == expected.pooled, "another vector than when alone"
            scored = [entry and entry.token_id for entry in self.scored[event.index]]
            parts = {0}.union(*map(positions_of, self.request.images))
            ids = enumerate(self.request.prompt)
            wanted = [None if at in parts else token_id for at, token_id in ids]
            assert scored == (wanted if self.request.prompt_logprobs is not None else [])
            assert (token_ids, text) == (expected.token_ids, expected.text), "cut short"
