"""Compaction: the model writes a summary of a conversation, which stands for it from then on.

The summary's turn is the conversation and one more message, so that all of it is cached.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from engine.api import EngineError
from engine.values.model import ModelCard
from server.errors import SERVER, ApiError
from server.fairness import Workers
from server.generation.choice import Choice
from server.generation.conversation import Chat, Conversation, Message, digest_of, texts
from server.generation.request_fields import SampledRequest
from server.generation.requests import ServedModel
from server.generation.seals import Summary
from server.generation.tools import ToolChoice
from server.generation.warming import WarmPrompt, warm, warm_request
from server.record import Principal, RequestRecord

SUMMARY_SHARE = 8
"""A summary has at most this part of the context, and as much is left for what asks for it."""

SUMMARIZE = (
    "Summarize this conversation so that the work can go on from the summary alone: all that is "
    "above will be gone. Keep what was asked and decided, preferences, facts, names, paths and "
    "code that are still needed, what was done with which result, and what is left to do. Write "
    "the summary and nothing else."
)
SUMMARY_HEAD = "The conversation so far, in a summary:\n\n"
LAST_HEAD = "\n\nThe last message, which is yet to be answered:\n\n"

MAX_QUOTED_CHARACTERS = 4000
"""A longer last message is in the summary alone."""

MOST_WARMED = 16
"""How many heads are computed at once. More are not: a request computes its own."""

log = logging.getLogger("rootstock.compaction")


def threshold(asked: int | None, card: ModelCard) -> int:
    """The tokens of a prompt from which on it is compacted: as many as asked for, but so few that
    the summary's turn has room in the context.
    """
    most = card.max_sequence_tokens - 2 * (card.max_sequence_tokens // SUMMARY_SHARE)
    return most if asked is None else min(asked, most)


def summary_chat(
    conversation: Conversation,
    model: ServedModel,
    sampling: SampledRequest,
    instructions: str,
    max_tokens: int | None,
) -> Chat:
    """The turn in which the model summarizes the conversation. No tools are called in it; where the
    template leaves tools out that may not be called, they may, so that the prompt stays as it was.
    """
    asks = Message(role="user", parts=texts(instructions))
    most = model.engine.card.max_sequence_tokens // SUMMARY_SHARE
    most = min(most, max_tokens or most)
    asked = replace(
        conversation,
        messages=[*conversation.messages, asks],
        tool_choice=ToolChoice("none" if model.planner.marker else "auto"),
        continue_final_message=False,
    )
    budget = most // 2 if model.planner.reasons else None
    return Chat(conversation=asked, sampling=sampling, max_tokens=most, thinking_budget=budget)


def pending_text(conversation: Conversation) -> str:
    """The message of a user that is yet to be answered, as the end of a summary: no model repeats
    it word for word. Empty where there is none.
    """
    last = conversation.messages[-1]
    is_quoted = last.role == "user" and 0 < len(last.text) <= MAX_QUOTED_CHARACTERS
    return LAST_HEAD + last.text if is_quoted else ""


def summary_text(choice: Choice) -> str:
    """The text that the model has written; empty if it wrote none."""
    return "".join(block.text for block in choice.blocks if block.kind == "text").strip()


def no_summary() -> ApiError:
    """The error of a compaction in which the model wrote no text."""
    message = "The model wrote no summary; the conversation is as it was."
    return ApiError(500, message, type=SERVER, code="compaction_failed")


def stands_for(messages: Sequence[Message], text: str) -> list[Message]:
    """The conversation that goes on from a summary of all these messages. The instructions at their
    head stay, and the tools that they made known.
    """
    n_leading = next(
        (index for index, each in enumerate(messages) if each.role != "system" or each.tools),
        len(messages),
    )
    tools = [tool for each in messages[n_leading:] for tool in each.tools]
    known = [Message(role="system", tools=tools)] if tools else []
    return [*messages[:n_leading], *known, _told(text)]


def compacted(messages: Sequence[Message], summary: Summary) -> list[Message]:
    """The conversation that goes on from a summary, which comes after these messages. It stands for
    them; but those of users alone, which a client has kept of a longer conversation, stay.
    """
    is_kept = all(each.role in {"system", "user"} for each in messages)
    if is_kept and digest_of(messages) != summary.covered:
        return [*messages, _told(summary.text)]
    return stands_for(messages, summary.text)


def _told(summary: str) -> Message:
    return Message(role="user", parts=texts(SUMMARY_HEAD + summary))


def summarized(conversation: Conversation, text: str) -> Conversation:
    """The conversation in which a summary stands for all messages."""
    messages = stands_for(conversation.messages, text)
    return replace(conversation, messages=messages, continue_final_message=False)


class HeadWarmer:
    """Computes the prompts of conversations that were compacted, before their next requests come
    and while the engine is idle.
    """

    def __init__(self, workers: Workers) -> None:
        """Called on the event loop, which ends what is running."""
        self._workers = workers
        self._loop = asyncio.get_running_loop()
        self._running = set[asyncio.Task[None]]()

    def start(self, head: Conversation, model: ServedModel, principal: Principal, id: str) -> None:
        """From any thread: begin to compute what a conversation begins with. `id` is that of the
        request that compacted it. The model is not held: the work ends when it is unloaded. A head
        with images is left to its request, which has them.
        """
        if not head.images:
            record = RequestRecord(f"{id}-head", principal)
            self._loop.call_soon_threadsafe(self._start, head, model, record)

    def _start(self, head: Conversation, model: ServedModel, record: RequestRecord) -> None:
        if len(self._running) < MOST_WARMED:
            task = self._loop.create_task(self._warm(head, model, record))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _warm(self, head: Conversation, model: ServedModel, record: RequestRecord) -> None:
        """Raises nothing: nobody waits for it."""
        prompt = WarmPrompt(head, head.cache_salt)
        n_bytes = sum(len(message.text) for message in head.messages)
        try:
            request = await self._workers.run(
                record.client, n_bytes, lambda: warm_request(prompt, model, record)
            )
            warmed = await warm(request, model)
            log.debug("%s: %d tokens warmed after a summary", model.name, warmed.computed_tokens)
        except (ApiError, EngineError) as error:
            log.info("%s: the head of a summary is not warmed: %s", model.name, error)
        except Exception:
            log.exception("%s: the head of a summary is not warmed", model.name)
