"""The answers of `/v1/responses`: responses, output items, and the events of a stream."""

import base64
import binascii
from collections.abc import Sequence
from typing import Any, Literal, NotRequired

from pydantic import BaseModel
from typing_extensions import TypedDict

from server.dialects.error_shapes import ResponsesErrorEvent
from server.dialects.openai_logprobs import TokenLogprobBody
from server.generation.progress import ProgressBody
from server.json_model import AnswerType

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprobBody]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(TypedDict):
    type: Literal["summary_text"]
    text: str


class _Item(TypedDict):
    id: str
    status: ItemStatus


class OutputMessage(_Item):
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningOutput(_Item):
    type: Literal["reasoning"]
    summary: list[SummaryText]
    content: NotRequired[list[ReasoningText]]
    encrypted_content: NotRequired[str]


class _Call(_Item):
    call_id: str
    name: str
    namespace: NotRequired[str]


class FunctionCallOutput(_Call):
    type: Literal["function_call"]
    arguments: str  # JSON


class CustomToolCallOutput(_Call):
    type: Literal["custom_tool_call"]
    input: str


class PatchOperation(TypedDict):
    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: NotRequired[str]


class ApplyPatchCallOutput(_Item):
    type: Literal["apply_patch_call"]
    call_id: str
    operation: PatchOperation


class ShellAction(TypedDict):
    commands: list[str]
    timeout_ms: int | None
    max_output_length: int | None


class LocalEnvironment(TypedDict):
    type: Literal["local"]


class ShellCallOutput(_Item):
    type: Literal["shell_call"]
    call_id: str
    action: ShellAction
    environment: LocalEnvironment


class LocalShellAction(TypedDict):
    type: Literal["exec"]
    command: list[str]
    env: dict[str, str]
    timeout_ms: int | None
    user: str | None
    working_directory: str | None


class LocalShellCallOutput(_Item):
    type: Literal["local_shell_call"]
    call_id: str
    action: LocalShellAction


class ToolSearchCallOutput(_Item):
    type: Literal["tool_search_call"]
    call_id: str
    arguments: dict[str, Any]
    execution: Literal["client"]


class CompactionOutput(TypedDict):
    id: str
    type: Literal["compaction"]
    encrypted_content: str


OutputItem = (
    OutputMessage
    | ReasoningOutput
    | FunctionCallOutput
    | CustomToolCallOutput
    | ApplyPatchCallOutput
    | ShellCallOutput
    | LocalShellCallOutput
    | ToolSearchCallOutput
    | CompactionOutput
)


class InputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int  # always 0: writing to the cache costs nothing


class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


class TurnUsage(TypedDict):
    """The tokens of one turn of the model."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseUsage(TurnUsage):
    """The tokens of the answer. `compaction` has those of a summary that was made before it."""

    compaction: NotRequired[TurnUsage]


class ResponseError(TypedDict):
    code: str
    message: str


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class ResponseHead(TypedDict):
    """The fields of a response that never change."""

    id: str
    object: Literal["response"]
    created_at: int  # seconds since the epoch
    model: str
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    frequency_penalty: float
    max_tool_calls: int | None
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: NotRequired[str]


class ResponseState(TypedDict):
    """The fields of a response that change, but for its output."""

    status: ResponseStatus
    completed_at: int | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    usage: ResponseUsage | None  # null until the response is complete


class ResponseBody(ResponseHead, ResponseState):
    """A whole response."""

    output: list[OutputItem]


class CompactedResponse(TypedDict):
    """What stands for a conversation: one item."""

    id: str
    object: Literal["response.compaction"]
    created_at: int  # seconds since the epoch
    output: list[CompactionOutput]
    usage: TurnUsage


class InputItemList(TypedDict):
    """A page of the items that a response was made from."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class StatusEvent(TypedDict):
    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: ResponseBody
    prompt_progress: NotRequired[ProgressBody]  # in progress, with return_progress


class ItemEvent(TypedDict):
    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: OutputItem


class _WithinItem(TypedDict):
    sequence_number: int
    item_id: str
    output_index: int


class CompactingEvent(_WithinItem):
    """A summary is being written."""

    type: Literal["response.compaction.compacting"]


class _WithinContent(_WithinItem):
    content_index: int


class _WithinSummary(_WithinItem):
    summary_index: int


class PartEvent(_WithinContent):
    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText | ReasoningText


class OutputTextDelta(_WithinContent):
    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[TokenLogprobBody]


class OutputTextDone(_WithinContent):
    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[TokenLogprobBody]


class ReasoningTextDelta(_WithinContent):
    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningTextDone(_WithinContent):
    type: Literal["response.reasoning_text.done"]
    text: str


class SummaryPartEvent(_WithinSummary):
    type: Literal["response.reasoning_summary_part.added", "response.reasoning_summary_part.done"]
    part: SummaryText


class SummaryTextDelta(_WithinSummary):
    type: Literal["response.reasoning_summary_text.delta"]
    delta: str


class SummaryTextDone(_WithinSummary):
    type: Literal["response.reasoning_summary_text.done"]
    text: str


class ArgumentsDelta(_WithinItem):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(_WithinItem):
    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class CustomInputDelta(_WithinItem):
    type: Literal["response.custom_tool_call_input.delta"]
    delta: str


class CustomInputDone(_WithinItem):
    type: Literal["response.custom_tool_call_input.done"]
    input: str


class _WithinCommand(TypedDict):
    sequence_number: int
    output_index: int
    command_index: int


class ShellCommandEvent(_WithinCommand):
    type: Literal["response.shell_call_command.added", "response.shell_call_command.done"]
    command: str


class ShellCommandDelta(_WithinCommand):
    type: Literal["response.shell_call_command.delta"]
    delta: str


RESPONSE_EVENTS: Sequence[AnswerType] = (
    StatusEvent,
    ItemEvent,
    CompactingEvent,
    PartEvent,
    OutputTextDelta,
    OutputTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    SummaryPartEvent,
    SummaryTextDelta,
    SummaryTextDone,
    ArgumentsDelta,
    ArgumentsDone,
    CustomInputDelta,
    CustomInputDone,
    ShellCommandEvent,
    ShellCommandDelta,
    ResponsesErrorEvent,
)

_PREFIX = "rootstock1:"  # it tells the content from that of other servers


def seal(reasoning: str) -> str:
    """Reasoning as `encrypted_content`, which clients send back where the server stores nothing.

    It is the text in base64, not encrypted: the client may read it anyway.
    """
    return _PREFIX + base64.urlsafe_b64encode(reasoning.encode()).decode()


def unseal(content: str) -> str:
    """The reasoning in `encrypted_content`; empty for content of other servers."""
    if not content.startswith(_PREFIX):
        return ""
    try:
        return base64.urlsafe_b64decode(content.removeprefix(_PREFIX)).decode()
    except (binascii.Error, ValueError):
        return ""
