"""Compaction in `/v1/responses`: the items, responses that are a summary, and `/compact`."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter
from pydantic_core import to_json

from server.dialects.job import Job
from server.dialects.responses.items import (
    CompactionTriggerItem,
    ConversationItem,
    ResponseTools,
)
from server.dialects.responses.output import CompactedResponse, CompactionOutput
from server.dialects.responses.schema import CompactRequest, ReasoningOptions
from server.dialects.responses.store import StoredItem
from server.dialects.responses.write import ResponseForm, ResponseWriter, turn_usage
from server.dialects.summaries import SummaryTurn
from server.generation.choice import AnswerUsage, Choice, Step
from server.generation.seals import Seals, Summary
from server.record import RequestRecord
from server.service import RequestContext

_TOOLS = TypeAdapter[ResponseTools](ResponseTools)


def is_trigger(items: Sequence[ConversationItem]) -> bool:
    """Whether the response is to be a summary."""
    return bool(items) and isinstance(items[-1], CompactionTriggerItem)


def compaction_item(summary: Summary, seals: Seals, record: RequestRecord) -> StoredItem:
    """The item that stands for what was summarized."""
    return StoredItem(f"cmp_{record.id}", to_json(_output(summary, seals, record)))


def _output(summary: Summary, seals: Seals, record: RequestRecord) -> CompactionOutput:
    return _item(record, seals.sealed(summary))


def _item(record: RequestRecord, sealed: str) -> CompactionOutput:
    return {"id": f"cmp_{record.id}", "type": "compaction", "encrypted_content": sealed}


def as_before(body: CompactRequest, response: bytes) -> CompactRequest:
    """The body with the tools, instructions and effort of the response that it continues, where it
    has none of its own.
    """
    before = json.loads(response)
    known = {
        "tools": _TOOLS.validate_python(before["tools"]),
        "instructions": before["instructions"],
        "reasoning": ReasoningOptions.model_validate({"effort": before["reasoning"]["effort"]}),
    }
    update = {name: known[name] for name in known if name not in body.model_fields_set}
    return body.model_copy(update=update)


@dataclass(frozen=True, slots=True)
class CompactionForm:
    """Writes the answer of `/v1/responses/compact`."""

    turn: SummaryTurn
    context: RequestContext

    def whole(self, choices: Sequence[Choice], usage: AnswerUsage) -> bytes:
        """The JSON of a CompactedResponse."""
        summary, record = self.turn.written(choices, self.context), self.context.record
        body: CompactedResponse = {
            "id": f"resp_{record.id}",
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [_output(summary, self.context.service.seals, record)],
            "usage": turn_usage(usage),
        }
        return to_json(body)

    def job(self) -> Job:
        """The job that makes it."""
        turn = self.turn
        return Job(
            model=turn.model,
            requests=[turn.request],
            plan=turn.plan,
            render=self.whole,
            form_bytes=turn.kept_bytes,
        )


@dataclass(frozen=True, slots=True)
class SummaryForm:
    """Writes a response whose output is a summary."""

    form: ResponseForm
    turn: SummaryTurn
    context: RequestContext

    def whole(self, choices: Sequence[Choice], usage: AnswerUsage) -> bytes:
        """The JSON of the complete ResponseBody, which is stored."""
        return self.form.stored("completed", [self.item(choices)], usage=self.form.usage(usage))

    def item(self, choices: Sequence[Choice]) -> StoredItem:
        """The item that stands for the conversation. Raises ApiError (500) where there is none."""
        summary = self.turn.written(choices, self.context)
        return compaction_item(summary, self.context.service.seals, self.context.record)

    def job(self, *, is_streamed: bool) -> Job:
        """The job that makes the response."""
        return Job(
            model=self.turn.model,
            requests=[self.turn.request],
            plan=self.turn.plan,
            render=self.whole,
            writer=self._writer if is_streamed else None,
            form_bytes=self.form.kept_bytes + self.turn.kept_bytes,
        )

    def _writer(self, choices: Sequence[Choice]) -> "SummaryWriter":
        return SummaryWriter(self, choices)


class SummaryWriter(ResponseWriter):
    """The events of a response whose output is a summary, which is sent when it is complete."""

    def __init__(self, form: SummaryForm, choices: Sequence[Choice]) -> None:
        (choice,) = choices
        super().__init__(form.form, choice)
        self._summary_form = form
        self._is_compacting = False

    def write(self, choice: int, steps: Sequence[Step]) -> bytes:
        opened = self.opening()
        if self._is_compacting:
            return opened
        self._is_compacting = True
        item = _item(self._form.record, "")
        at = b'"item_id":"%b","output_index":0' % item["id"].encode()
        added = self.item_event("added", 0, to_json(item))
        return opened + added + self.event("response.compaction.compacting", at)

    def end(self, usage: AnswerUsage) -> bytes:
        item, form = self._summary_form.item([self._choice]), self._form
        done = self.item_event("done", 0, item.json)
        response = form.stored("completed", [item], usage=form.usage(usage))
        return done + self.ending("completed", response)
