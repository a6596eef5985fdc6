"""The turn in which a model summarizes a conversation, for the dialects that compact."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from engine.values.request import Request
from server.generation.choice import AnswerUsage, Choice, answer_usage
from server.generation.compaction import (
    SUMMARIZE,
    Summary,
    no_summary,
    summarized,
    summary_chat,
    summary_of,
)
from server.generation.conversation import Conversation
from server.generation.plan import AnswerPlan
from server.generation.request_fields import SampledRequest
from server.generation.requests import ServedModel, prepare_chat
from server.generation.stream import generating, kept_bytes
from server.record import RequestRecord, output_of
from server.service import RequestContext


@dataclass(frozen=True, slots=True)
class SummaryDone:
    """A turn that is over. Its summary is None where the model wrote no text."""

    summary: Summary | None
    usage: AnswerUsage


@dataclass(frozen=True, slots=True)
class SummaryTurn:
    """A turn in which the model summarizes a conversation."""

    model: ServedModel
    conversation: Conversation
    request: Request
    plan: AnswerPlan

    @classmethod
    def of(
        cls,
        conversation: Conversation,
        model: ServedModel,
        record: RequestRecord,
        sampling: SampledRequest,
        instructions: str = SUMMARIZE,
    ) -> Self:
        """The turn with these instructions. Raises ApiError (400) where it has no room."""
        chat = summary_chat(conversation, model, sampling, instructions)
        request, plan = prepare_chat(chat, model, record)
        return cls(model, conversation, request, plan)

    async def run(self, context: RequestContext) -> SummaryDone:
        """Have the summary written, before the answer to the same request. Raises ApiError and the
        engine's errors.
        """
        record, output = context.record, output_of(context.record)
        request = replace(self.request, id=f"{record.id}-summary")
        remember = partial(self.model.replays.remember, request.cache_salt)
        choice = Choice(self.plan, remember, None)
        tracker = context.service.tracker
        with generating(self.model.engine, [request], output, record, tracker) as inbox:
            async for batch in inbox:
                for events in batch.values():
                    output.add(sum(map(kept_bytes, events)))
                    choice.feed(events)
        return SummaryDone(summary_of(choice, self.conversation), answer_usage([choice], 1))

    def written(self, choices: Sequence[Choice], context: RequestContext) -> Summary:
        """The summary that is the answer to a request. What the conversation begins with from then
        on is computed when the engine is idle. Raises ApiError (500) where there is none.
        """
        (choice,) = choices
        summary = summary_of(choice, self.conversation)
        if summary is None:
            raise no_summary()
        head, record = summarized(self.conversation, summary), context.record
        context.service.heads.start(head, self.model, record.principal, record.id)
        return summary
