"""The turn in which a model summarizes a conversation, for the dialects that compact."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from pydantic_core import to_json

from engine.values.request import Request
from server.generation.choice import AnswerUsage, Choice, answer_usage
from server.generation.compaction import (
    SUMMARIZE,
    no_summary,
    pending_text,
    summarized,
    summary_chat,
    summary_text,
)
from server.generation.conversation import Conversation, Message, digest_of
from server.generation.late_tools import read
from server.generation.plan import AnswerPlan
from server.generation.request_fields import PromptCacheOptions, SampledRequest
from server.generation.requests import ServedModel, prepare_chat
from server.generation.seals import Summary
from server.generation.stream import generating, kept_bytes
from server.generation.tools import Tool
from server.record import RequestRecord, output_of
from server.service import RequestContext

SAMPLING = frozenset(
    {
        "cache_salt",
        "min_p",
        "priority",
        "return_progress",
        "seed",
        "speculate",
        "stream",
        "temperature",
        "top_k",
        "top_p",
    }
)
"""The fields of a request that hold for its summary too. Others are of its answer."""


def summary_sampling(body: SampledRequest) -> SampledRequest:
    """How a summary for this request is sampled."""
    fields = body.model_dump(include=set(SAMPLING), exclude_unset=True)
    options = PromptCacheOptions(keep=body.prompt_cache_options.keep)
    return SampledRequest(**fields, prompt_cache_options=options)


@dataclass(frozen=True, slots=True)
class SummaryDone:
    """A turn that is over. Its summary is None where the model wrote no text. `made_known` are the
    names of the tools that messages had made known, not the request.
    """

    summary: Summary | None
    usage: AnswerUsage
    made_known: Sequence[str]


@dataclass(frozen=True, slots=True)
class SummaryTurn:
    """A turn in which the model summarizes a conversation. It keeps the messages that stay, as
    `rest`, and not those that the summary stands for.
    """

    model: ServedModel
    request: Request
    plan: AnswerPlan
    rest: Conversation
    covered: bytes  # a digest of the messages that the summary stands for
    pending: str  # the end of the summary: a message that is yet to be answered

    @classmethod
    def of(
        cls,
        conversation: Conversation,
        model: ServedModel,
        record: RequestRecord,
        sampling: SampledRequest,
        instructions: str = SUMMARIZE,
        max_tokens: int | None = None,
    ) -> Self:
        """The turn with these instructions, whose summary has at most `max_tokens`. Called in a
        worker. Raises ApiError (400) where it has no room, and UnpreparedImages.
        """
        salt = record.cache_salt(conversation.cache_salt)
        conversation = _with_tools(conversation, model, salt)
        chat = summary_chat(conversation, model, sampling, instructions, max_tokens)
        request, plan = prepare_chat(chat, model, record)
        rest = summarized(conversation, "")
        rest = replace(rest, messages=rest.messages[:-1])
        covered = digest_of(conversation.messages)
        return cls(model, request, plan, rest, covered, pending_text(conversation))

    @property
    def made_known(self) -> Sequence[str]:
        """The names of the tools that messages had made known, not the request."""
        return [tool.name for message in self.rest.messages for tool in message.tools]

    @property
    def kept_bytes(self) -> int:
        """What it keeps of the body."""
        tools = sum(len(to_json(tool.declared)) for tool in self.rest.known_tools)
        return tools + sum(len(message.text) for message in self.rest.messages)

    async def run(self, context: RequestContext) -> SummaryDone:
        """Have the summary written, before the answer to the same request. Raises ApiError and the
        engine's errors.
        """
        record, output = context.record, output_of(context.record)
        request = replace(self.request, id=f"{record.id}-summary", reports_progress=False)
        choice = Choice(self.plan)  # nobody sends a summary's turn back
        tracker = context.service.tracker
        with generating(self.model.engine, [request], output, record, tracker) as inbox:
            async for batch in inbox:
                for events in batch.values():
                    output.add(sum(map(kept_bytes, events)))
                    choice.feed(events)
        return SummaryDone(self._summary(choice), answer_usage([choice], 1), self.made_known)

    def written(self, choices: Sequence[Choice], context: RequestContext) -> Summary:
        """The summary that is the answer to a request. What the conversation begins with from then
        on is computed when the engine is idle, unless nothing of the request is to be kept. Raises
        ApiError (500) where there is no summary.
        """
        (choice,) = choices
        summary = self._summary(choice)
        if summary is None:
            raise no_summary()
        if self.request.shared_tokens == 0:
            return summary
        head = summarized(self.rest, summary.text)
        context.service.heads.start(head, self.model, context.record.principal, context.record.id)
        return summary

    def _summary(self, choice: Choice) -> Summary | None:
        text = summary_text(choice)
        return Summary(text + self.pending, self.covered) if text else None


def _with_tools(conversation: Conversation, model: ServedModel, cache_salt: str) -> Conversation:
    """The conversation with the tools that its prompt has, where the request has none, as that of
    the next turn has them again.
    """
    if conversation.tools or not conversation.concerns_tools:
        return conversation
    continued = replace(conversation, messages=[*conversation.messages, Message(role="user")])
    head = model.replays.tool_places.place(continued, cache_salt).head
    return replace(conversation, tools=[Tool(read(each)) for each in head])
