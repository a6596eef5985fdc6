"""Answers of `/v1/messages` that are a summary of the conversation, and nothing else."""

from collections.abc import Sequence

from pydantic_core import to_json

from engine.values.output import Usage
from server.dialects.job import Job
from server.dialects.messages.write import (
    CompactionBlock,
    MessageEnd,
    MessageForm,
    MessageUsage,
    MessageWriter,
    compaction_events,
)
from server.dialects.summaries import SummaryTurn
from server.generation.choice import AnswerUsage, Choice, Step
from server.generation.seals import Seals, Summary
from server.service import RequestContext


def compaction_block(summary: Summary, made_known: Sequence[str], seals: Seals) -> CompactionBlock:
    """The block that stands for what was summarized, and the tools that it had made known."""
    block: CompactionBlock = {
        "type": "compaction",
        "content": summary.text,
        "signature": seals.signature(summary.text),
    }
    if made_known:
        block["tool_changes"] = [
            {"type": "tool_addition", "tool": {"type": "tool_reference", "name": name}}
            for name in made_known
        ]
    return block


class SummaryForm(MessageForm):
    """Writes a message that is a summary."""

    def __init__(
        self, turn: SummaryTurn, context: RequestContext, max_tokens: int, *, is_marked: bool
    ) -> None:
        super().__init__(turn.model.name, turn.request, max_tokens, is_marked=is_marked)
        self._turn = turn
        self._context = context

    def job(self, *, is_streamed: bool) -> Job:
        """The job that makes the message."""
        return Job(
            model=self._turn.model,
            requests=[self._turn.request],
            plan=self._turn.plan,
            render=self.whole,
            writer=self.writer if is_streamed else None,
            form_bytes=self._turn.kept_bytes,
        )

    def whole(self, choices: Sequence[Choice], usage: AnswerUsage) -> bytes:
        (choice,) = choices
        return to_json(self.message([self.block(choice)], self.usage(usage), self.end(choice)))

    def writer(self, choices: Sequence[Choice]) -> "SummaryWriter":
        (choice,) = choices
        return SummaryWriter(self, choice)

    def block(self, choice: Choice) -> CompactionBlock:
        """The only block. Raises ApiError (500) where the model wrote no summary."""
        summary = self._turn.written([choice], self._context)
        return compaction_block(summary, self._turn.made_known, self._context.service.seals)

    def usage(self, usage: Usage) -> MessageUsage:
        """The tokens of the summary, which are in `iterations` alone, as Anthropic has it."""
        none = super().usage(Usage(0, 0, 0))
        return {**none, "iterations": [self.summary_usage(usage)]}

    def end(self, choice: Choice) -> MessageEnd:
        return {"stop_reason": "compaction", "stop_sequence": None}


class SummaryWriter(MessageWriter):
    """The events of a message that is a summary, which is sent when it is complete."""

    def __init__(self, form: SummaryForm, choice: Choice) -> None:
        super().__init__(form, choice)
        self._summary_form = form

    def write(self, choice: int, steps: Sequence[Step]) -> bytes:
        return self.begin()

    def end(self, usage: AnswerUsage) -> bytes:
        return compaction_events(self._summary_form.block(self._choice)) + super().end(usage)
