"""The prompt tokens of a request, whether a chat or a plain prompt."""

from functools import partial

from server.generation.history import found_replays, template_arguments
from server.generation.models import ServedModel
from server.record import RequestRecord
from server.schemas.chat import Conversation
from server.schemas.prompt import PromptOrChat


async def chat_tokens(
    conversation: Conversation, model: ServedModel, record: RequestRecord
) -> tuple[int, ...]:
    """The prompt of a chat. Raises ApiError (400) for one that the model cannot take."""
    salt, messages = record.cache_salt(conversation.cache_salt), conversation.messages
    replays = partial(found_replays, model.replays, messages, salt)
    return await model.prompts.chat(record, messages, template_arguments(conversation), replays)


async def prompt_tokens(
    body: PromptOrChat,
    model: ServedModel,
    record: RequestRecord,
    *,
    add_special_tokens: bool = True,
) -> tuple[int, ...]:
    """The prompt of either kind of completion. `add_special_tokens` applies to plain text.

    Raises ApiError (400) for one that the model cannot take.
    """
    if body.prompt is None:
        return await chat_tokens(body.conversation, model, record)
    return await model.prompts.text(record, body.prompt, add_special_tokens=add_special_tokens)
