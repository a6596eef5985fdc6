"""Compaction: the model writes a summary of a conversation, which stands for it from then on.

The summary's turn is the conversation and one more message, so that all of it is cached. Clients
keep summaries and send them back sealed, as they keep other items of an answer.
"""

import asyncio
import base64
import binascii
import hmac
import logging
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from anyio.abc import TaskGroup

from engine.api import EngineError
from engine.values.model import ModelCard
from server.errors import SERVER, ApiError, InvalidField
from server.fairness import Workers
from server.generation.choice import Choice
from server.generation.conversation import Chat, Conversation, Message, digest_of, texts
from server.generation.request_fields import SampledRequest
from server.generation.requests import ServedModel
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

KEY_FILE = "compaction.key"
KEY_BYTES = 32
PREFIX = "rootstock-summary1:"
"""How a sealed summary begins. It tells one from those of other servers."""

DIGEST_BYTES = len(digest_of([]))

MOST_WARMED = 16
"""How many heads are computed at once. More are not: a request computes its own."""

log = logging.getLogger("rootstock.compaction")


@dataclass(frozen=True, slots=True)
class Summary:
    """A summary, and the digest of the messages that it stands for."""

    text: str
    covered: bytes


class Seals:
    """Seals summaries with a key of the daemon's, so that nobody changes or makes one, and opens
    them. A summary is not encrypted: its client may read it.
    """

    def __init__(self, key: bytes, *, is_kept: bool) -> None:
        """`is_kept` says whether the key is the same after a restart."""
        self._key = key
        self._is_kept = is_kept
        self._has_warned = is_kept

    def seal(self, summary: Summary) -> str:
        """The summary as text for a client."""
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "summaries of conversations are sealed with a key that ends with this process: "
                "there is no disk_cache to keep it in"
            )
        sealed = summary.covered + summary.text.encode("utf-8", "replace")
        return PREFIX + base64.urlsafe_b64encode(self._mac(sealed) + sealed).decode()

    def open(self, sealed: str, field: str) -> Summary:
        """The summary that was sealed. Raises ApiError (400) for any other text of that field."""
        if not sealed.startswith(PREFIX):
            message = (
                "another server has sealed it, and no other can read it; send the messages that it "
                "stands for, or a summary as a message"
            )
            raise InvalidField(field, message, "compaction_foreign")
        try:
            raw = base64.b64decode(sealed[len(PREFIX) :].encode(), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        mac, content = raw[:KEY_BYTES], raw[KEY_BYTES:]
        if len(content) < DIGEST_BYTES or not hmac.compare_digest(mac, self._mac(content)):
            why = "" if self._is_kept else " (or before this server started: it keeps no key)"
            message = f"it is damaged, or was sealed with another key{why}"
            raise InvalidField(field, message, "compaction_signature_invalid")
        return Summary(content[DIGEST_BYTES:].decode(), content[:DIGEST_BYTES])

    def _mac(self, content: bytes) -> bytes:
        return hmac.digest(self._key, PREFIX.encode() + content, "sha256")


def load_seals(directory: Path | None) -> Seals:
    """Seals with the key of that directory, which is made there when there is none. Without a
    directory, or where it cannot be used, the key ends with the process.
    """
    if directory is not None:
        try:
            return Seals(_kept_key(directory), is_kept=True)
        except (OSError, ValueError) as error:
            log.warning("cannot keep the key of summaries in %s: %s", directory, error)
    return Seals(secrets.token_bytes(KEY_BYTES), is_kept=False)


def _kept_key(directory: Path) -> bytes:
    """Raises OSError, and ValueError for a file that is no key."""
    path = directory / KEY_FILE
    if not path.exists():
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = directory / f"{KEY_FILE}.{secrets.token_hex(8)}"
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):  # another daemon was first
            os.link(new, path)
        new.unlink()
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        key = file.read(KEY_BYTES + 1)
    if len(key) != KEY_BYTES:
        raise ValueError(f"{KEY_FILE} has not {KEY_BYTES} bytes")
    return key


def threshold(asked: int | None, card: ModelCard) -> int:
    """The tokens of a prompt from which on it is compacted: as many as asked for, but so few that
    the summary's turn has room in the context.
    """
    most = card.max_sequence_tokens - 2 * (card.max_sequence_tokens // SUMMARY_SHARE)
    return most if asked is None else min(asked, most)


def summary_chat(
    conversation: Conversation, model: ServedModel, sampling: SampledRequest, instructions: str
) -> Chat:
    """The turn in which the model summarizes the conversation. No tools are called in it; where the
    template leaves tools out that may not be called, they may, so that the prompt stays as it was.
    """
    asks = Message(role="user", parts=texts(instructions))
    most = model.engine.card.max_sequence_tokens // SUMMARY_SHARE
    asked = replace(
        conversation,
        messages=[*conversation.messages, asks],
        tool_choice=ToolChoice("none" if model.planner.marker else "auto"),
        continue_final_message=False,
    )
    budget = most // 2 if model.planner.reasons else None
    return Chat(conversation=asked, sampling=sampling, max_tokens=most, thinking_budget=budget)


def summary_of(choice: Choice, conversation: Conversation) -> Summary | None:
    """The summary that the model has written of the conversation; None if it wrote no text."""
    text = "".join(block.text for block in choice.blocks if block.kind == "text").strip()
    return Summary(text, digest_of(conversation.messages)) if text else None


def no_summary() -> ApiError:
    """The error of a compaction in which the model wrote no text."""
    message = "The model wrote no summary; the conversation is as it was."
    return ApiError(500, message, type=SERVER, code="compaction_failed")


def compacted(messages: Sequence[Message], summary: Summary) -> list[Message]:
    """The conversation that goes on from the summary. Of the messages before it the instructions
    stay, and the tools that they made known; and those of users alone that a client has kept, where
    they are not what the summary stands for.
    """
    n_leading = next(
        (index for index, each in enumerate(messages) if each.role != "system" or each.tools),
        len(messages),
    )
    rest = messages[n_leading:]
    is_kept = all(each.role in {"system", "user"} for each in rest)
    if not is_kept or digest_of(messages) == summary.covered:
        tools = [tool for each in rest for tool in each.tools]
        rest = [Message(role="system", tools=tools)] if tools else []
    stands_for = Message(role="user", parts=texts(SUMMARY_HEAD + summary.text))
    return [*messages[:n_leading], *rest, stands_for]


def summarized(conversation: Conversation, summary: Summary) -> Conversation:
    """The conversation in which the summary stands for all messages."""
    messages = compacted(conversation.messages, summary)
    return replace(conversation, messages=messages, continue_final_message=False)


class HeadWarmer:
    """Computes the prompts of conversations that were compacted, before their next requests come
    and while the engine is idle.
    """

    def __init__(self, tasks: TaskGroup, workers: Workers) -> None:
        self._tasks = tasks
        self._workers = workers
        self._loop = asyncio.get_running_loop()
        self._n_running = 0

    def start(self, head: Conversation, model: ServedModel, principal: Principal, id: str) -> None:
        """From any thread: begin to compute what a conversation begins with. `id` is that of the request that
        compacted it. The model is not held: what it is doing ends when it is unloaded. A head with
        images is left to its request, which has them.
        """
        if not head.images:
            record = RequestRecord(f"{id}-head", principal)
            self._loop.call_soon_threadsafe(self._start, head, model, record)

    def _start(self, head: Conversation, model: ServedModel, record: RequestRecord) -> None:
        if self._n_running < MOST_WARMED:
            self._n_running += 1
            self._tasks.start_soon(self._warm, head, model, record)

    async def _warm(self, head: Conversation, model: ServedModel, record: RequestRecord) -> None:
        """Raises nothing: an exception would end all tasks of the daemon's group."""
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
        finally:
            self._n_running -= 1
