"""The tokens of a prompt, in whatever form it comes."""

from functools import partial

from server.generation.history import found_replays, template_arguments
from server.generation.models import ServedModel
from server.record import RequestRecord
from server.schemas.chat import Conversation
from server.schemas.prompt import PromptOrChat


async def chat_tokens(
    body: Conversation, model: ServedModel, record: RequestRecord
) -> tuple[int, ...]:
    """Those that a model answers. Raises ApiError (400) for what it cannot be given."""
    salt = record.cache_salt(body.cache_salt)
    replays = partial(found_replays, model.replays, body.messages, salt)
    return await model.prompts.chat(record, body.messages, template_arguments(body), replays)


async def prompt_tokens(
    body: PromptOrChat,
    model: ServedModel,
    record: RequestRecord,
    *,
    add_special_tokens: bool = True,
) -> tuple[int, ...]:
    """As a completion would have them: `add_special_tokens` is for a bare prompt's text.

    Raises ApiError (400) for what the model cannot be given.
    """
    if body.prompt is None:
        return await chat_tokens(body, model, record)
    return await model.prompts.text(record, body.prompt, add_special_tokens=add_special_tokens)
