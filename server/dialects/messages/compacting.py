"""Answers of `/v1/messages` that are a summary of the conversation, and nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass

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
    ending,
)
from server.dialects.summaries import SummaryTurn
from server.generation.choice import AnswerUsage, Choice, Step
from server.generation.seals import Seals, Summary
from server.service import RequestContext

_END: MessageEnd = {"stop_reason": "compaction", "stop_sequence": None}


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


@dataclass(frozen=True, slots=True)
class SummaryForm:
    """Writes a message that is a summary."""

    form: MessageForm
    turn: SummaryTurn
    context: RequestContext

    def job(self, *, is_streamed: bool) -> Job:
        """The job that makes the message."""
        return Job(
            model=self.turn.model,
            requests=[self.turn.request],
            plan=self.turn.plan,
            render=self.whole,
            writer=self._writer if is_streamed else None,
            form_bytes=self.turn.kept_bytes,
        )

    def whole(self, choices: Sequence[Choice], usage: AnswerUsage) -> bytes:
        """The JSON of a MessageBody."""
        return to_json(self.form.message([self.block(choices)], self.usage(usage), _END))

    def block(self, choices: Sequence[Choice]) -> CompactionBlock:
        """The only block. Raises ApiError (500) where the model wrote no summary."""
        summary = self.turn.written(choices, self.context)
        return compaction_block(summary, self.turn.made_known, self.context.service.seals)

    def usage(self, usage: Usage) -> MessageUsage:
        """The tokens of the summary, which are in `iterations` alone, as Anthropic has it."""
        return {
            **self.form.usage(Usage(0, 0, 0)),
            "iterations": [self.form.summary_usage(usage)],
        }

    def _writer(self, choices: Sequence[Choice]) -> "SummaryWriter":
        return SummaryWriter(self, choices)


class SummaryWriter(MessageWriter):
    """The events of a message that is a summary, which is sent when it is complete."""

    def __init__(self, form: SummaryForm, choices: Sequence[Choice]) -> None:
        (choice,) = choices
        super().__init__(form.form, choice)
        self._summary_form = form

    def write(self, choice: int, steps: Sequence[Step]) -> bytes:
        return self.begin()

    def end(self, usage: AnswerUsage) -> bytes:
        events = compaction_events(self._summary_form.block([self._choice]))
        return events + ending(_END, self._summary_form.usage(usage))
