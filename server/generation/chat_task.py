"""A chat as a request to the engine, whatever dialect it was asked in."""

from dataclasses import dataclass, replace
from functools import partial

from engine.types.model import Task
from engine.types.request import Request
from server.generation.answer import ChatAnswer
from server.generation.chat import Chat
from server.generation.engine_requests import chat_request
from server.generation.events import UsageMeter
from server.generation.models import ServedModel
from server.generation.plan import AnswerPlan
from server.generation.tasks import check_task
from server.generation.tokens import chat_tokens
from server.record import RequestRecord


@dataclass(frozen=True, slots=True)
class ChatTask:
    """The engine's request, and the plan by which its answers are read."""

    chat: Chat
    model: ServedModel
    request: Request
    plan: AnswerPlan
    meter: UsageMeter

    def new_answer(self) -> ChatAnswer:
        """An empty answer, for the events of one sequence."""
        remember = partial(self.model.replays.remember, self.request.cache_salt)
        return ChatAnswer(self.plan, self.meter, remember)

    def without_answer(self) -> "ChatTask":
        """The same, of which the prompt alone is computed, and cached."""
        request = replace(self.request, max_tokens=0, constraint=None, thinking_budget=None)
        return replace(self, request=request)


async def chat_task(chat: Chat, model: ServedModel, record: RequestRecord) -> ChatTask:
    """Raises ApiError (400) for what the model cannot serve."""
    check_task(model, Task.GENERATE)
    prompt = await chat_tokens(chat.conversation, model, record)
    planned = partial(_planned, chat, prompt, model, record)
    return await model.workers.prepare(record, planned)


def _planned(
    chat: Chat, prompt: tuple[int, ...], model: ServedModel, record: RequestRecord
) -> ChatTask:
    plan = model.planner.plan(chat, prompt)
    request = chat_request(chat, prompt, plan, model.engine.card, record)
    request = replace(request, adapter=model.adapter)
    return ChatTask(chat, model, request, plan, UsageMeter(request.n))
