"""`POST /v1/messages` and `/v1/messages/count_tokens`."""

from contextlib import suppress
from dataclasses import dataclass, replace

from pydantic import BaseModel
from starlette.responses import Response

from server.dialects.endpoint import GENERATION_ERRORS, MODEL_ERRORS, Endpoints, named_events
from server.dialects.job import COMMENTS, Job, Postponed, respond_with
from server.dialects.messages.compacting import SummaryForm, compaction_block
from server.dialects.messages.read import as_chat, conversation
from server.dialects.messages.schema import CountTokensRequest, MessagesRequest
from server.dialects.messages.write import MESSAGE_EVENTS, Compacted, MessageBody, MessageForm
from server.dialects.summaries import SummaryDone, SummaryTurn, summary_sampling
from server.errors import ContextTooLong
from server.generation.compaction import SUMMARIZE, summarized, threshold
from server.generation.conversation import Chat
from server.generation.images import with_images
from server.generation.requests import ServedModel, prepare_chat, without_output
from server.http.stream import client_waiting
from server.service import ArrivedBody, Context


class TokenCount(BaseModel):
    input_tokens: int


@dataclass(frozen=True, slots=True)
class MessageMaker:
    """Prepares one request."""

    model: ServedModel
    context: Context

    async def job(self, body: ArrivedBody[MessagesRequest]) -> Job:
        """The job of a request. A conversation that is to be compacted before its answer is
        summarized first. Raises ApiError, and Postponed.
        """
        made = await body.run(self.prepare)
        if isinstance(made, Job):
            return made
        if body.postpones:
            raise Postponed
        done = await made.run(self.context)
        job = await body.run(lambda parsed: self.prepare(parsed, done))
        assert isinstance(job, Job), "it is summarized once"
        return job

    def prepare(self, body: MessagesRequest, done: SummaryDone | None = None) -> Job | SummaryTurn:
        """The job; or the turn that has to come first, unless it is `done`."""
        model, record, seals = self.model, self.context.record, self.context.service.seals
        chat = as_chat(body, model, record, seals)
        if body.compaction is not None:
            instructions = (body.compaction.instructions or "").strip() or SUMMARIZE
            return self._summary(body, self._turn(body, chat, instructions, body.max_tokens))
        compacted = None
        if done is not None and done.summary is not None:
            chat = replace(chat, conversation=summarized(chat.conversation, done.summary.text))
            compacted = Compacted(
                compaction_block(done.summary, done.made_known, seals), done.usage
            )
        request, plan = prepare_chat(chat, model, record)
        if done is None and (first := self._first(body, chat, len(request.prompt))) is not None:
            return first
        is_prewarm = body.is_prewarm or body.max_tokens == 0
        if body.max_tokens == 0:  # the prompt alone is computed, and cached
            request = without_output(request)
        form = MessageForm(
            model.name,
            request,
            0 if is_prewarm else body.max_tokens,
            is_marked=self._is_marked,
            compacted=compacted,
        )
        writer = form.writer if body.stream else None
        return Job(model=model, requests=[request], plan=plan, render=form.whole, writer=writer)

    def _first(
        self, body: MessagesRequest, chat: Chat, prompt_tokens: int
    ) -> Job | SummaryTurn | None:
        """What comes before the answer, or in place of it, by the edits of the context."""
        edit = body.context_management.compact
        if edit is None or body.is_prewarm or body.max_tokens == 0:
            return None
        asked = edit.trigger.value if edit.trigger else None
        if prompt_tokens < threshold(asked, self.model.engine.card):
            return None
        instructions = "\n\n".join(filter(None, (SUMMARIZE, edit.instructions)))
        with suppress(ContextTooLong):  # it has room for the answer, and none for a summary
            turn = self._turn(body, chat, instructions)
            return self._summary(body, turn) if edit.pause_after_compaction else turn
        return None

    def _turn(
        self, body: MessagesRequest, chat: Chat, instructions: str, max_tokens: int | None = None
    ) -> SummaryTurn:
        sampling, record = summary_sampling(body), self.context.record
        return SummaryTurn.of(
            chat.conversation, self.model, record, sampling, instructions, max_tokens
        )

    def _summary(self, body: MessagesRequest, turn: SummaryTurn) -> Job:
        """The job of a message that is a summary."""
        form = SummaryForm(turn, self.context, body.max_tokens, is_marked=self._is_marked)
        return form.job(is_streamed=body.stream)

    @property
    def _is_marked(self) -> bool:
        return self.model.settings.engine.prefix_cache and self.context.record.cache_marks > 0

    def count(self, body: CountTokensRequest) -> int:
        """The number of tokens of the prompt."""
        model, record = self.model, self.context.record
        salt = record.cache_salt(body.cache_salt)
        given = conversation(body, model, self.context.service.seals)
        shown = with_images(given, model.engine, record)
        return len(model.prompts.chat(shown, model.replays, salt).tokens)


router = Endpoints()


@router.endpoint(
    "POST",
    "/v1/messages",
    body=MessagesRequest,
    answer=MessageBody,
    stream=named_events(MESSAGE_EVENTS),
    errors=GENERATION_ERRORS,
)
async def create_message(context: Context) -> Response:
    body = await context.arrived(MessagesRequest)

    async def make(model: ServedModel) -> Job:
        job = await MessageMaker(model, context).job(body)
        body.replace(job.kept_bytes)
        return job

    return await respond_with(body, context, make, COMMENTS if body.head.stream else None)


@router.endpoint("POST", "/v1/messages/count_tokens", body=CountTokensRequest, errors=MODEL_ERRORS)
async def count_tokens(context: Context) -> TokenCount:
    """The number of prompt tokens that the same request to /v1/messages would have."""
    body = await context.arrived(CountTokensRequest)
    async with client_waiting(context.http.receive):
        await body.find()
        model = await body.hold()
        tokens = await body.run(MessageMaker(model, context).count)
    return TokenCount(input_tokens=tokens)
