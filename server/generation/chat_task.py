"""A chat as a request to the engine, whatever dialect it was asked in."""

from dataclasses import dataclass, replace
from functools import partial

from engine.values.model import Task
from engine.values.request import Request
from server.generation.answer import ChatAnswer
from server.generation.chat import Chat
from server.generation.conversation import Conversation
from server.generation.engine_requests import chat_request, check_token_ids, with_bad_words
from server.generation.events import UsageMeter
from server.generation.history import found_replays, template_arguments
from server.generation.models import ServedModel
from server.generation.plan import AnswerPlan
from server.generation.tasks import check_task
from server.record import RequestRecord


async def chat_tokens(
    conversation: Conversation, model: ServedModel, record: RequestRecord
) -> tuple[int, ...]:
    """The prompt of a chat. Raises ApiError (400) for one that the model cannot take."""
    salt, messages = record.cache_salt(conversation.cache_salt), conversation.messages
    replays = partial(found_replays, model.replays, messages, salt)
    arguments = partial(template_arguments, conversation)
    return await model.prompts.chat(record, messages, arguments, replays)


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
    prediction = await _predicted_tokens(chat.prediction, model, record)
    planned = partial(_planned, chat, prompt, prediction, model, record)
    return await model.workers.prepare(record, planned)


async def _predicted_tokens(
    text: str, model: ServedModel, record: RequestRecord
) -> tuple[int, ...]:
    """The tokens as the model would write them, in the midst of its turn."""
    if not text:
        return ()
    return await model.prompts.text(record, text, add_special_tokens=False, param="prediction")


def _planned(
    chat: Chat,
    prompt: tuple[int, ...],
    prediction: tuple[int, ...],
    model: ServedModel,
    record: RequestRecord,
) -> ChatTask:
    check_token_ids(prediction, model.engine.card, "prediction")
    plan = model.planner.plan(chat, prompt)
    request = chat_request(chat, prompt, plan, model.engine.card, record)
    words = model.prompts.bad_words(chat.sampling.bad_words)
    request = with_bad_words(request, words, model.engine.card)
    request = replace(request, adapter=model.adapter, prediction=prediction)
    return ChatTask(chat, model, request, plan, UsageMeter(request.n))
