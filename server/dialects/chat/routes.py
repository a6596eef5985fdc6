"""`POST /v1/chat/completions`, whole and streamed, and its `/render`."""

from collections.abc import Iterator, Sequence

from pydantic_core import to_json
from starlette.responses import Response

from engine.values.request import Request
from server.dialects.chat.schema import (
    AssistantMessage,
    CalledCustomTool,
    CalledFunction,
    ChatChunk,
    ChatCompletion,
    ChatFinishReason,
    ChatRequest,
    CustomDelta,
    CustomToolCallBody,
    CustomToolCallDelta,
    Delta,
    FunctionDelta,
    ToolCallBody,
    ToolCallDelta,
)
from server.dialects.endpoint import MODEL_ERRORS, Endpoints, chunks
from server.dialects.job import Job, wire_json
from server.dialects.openai import (
    ChunkWriter,
    response_fields,
    served_tools,
    usage_fields,
    wire_finish_reason,
)
from server.dialects.openai_logprobs import ChoiceLogprobs, chat_logprobs
from server.dialects.render import RenderedRequest, rendered_request, rendered_response
from server.generation.choice import AnswerUsage, Block, Choice, Closed, Grew, Opened, Step
from server.generation.conversation import Chat
from server.generation.requests import ServedModel, prepare_chat
from server.generation.tools import Tool, custom_input
from server.record import RequestRecord
from server.service import Context


class ChatForm:
    """Writes one request's completions. It keeps nothing else of the body."""

    def __init__(self, body: ChatRequest, model: ServedModel, id: str) -> None:
        self._fields = response_fields("chatcmpl", id, model)
        self._names_tier = body.service_tier is not None
        self._include_usage = body.include_usage
        self._tokenizer = model.engine.tokenizer if body.logprobs else None
        self._calls = (
            FunctionCallForm() if body.functions else ToolCallsForm(served_tools(body.tools))
        )

    def whole(self, choices: Sequence[Choice], usage: AnswerUsage) -> bytes:
        """The JSON of a ChatCompletion."""
        completion: ChatCompletion = {
            **self._fields,
            "object": "chat.completion",
            "choices": [
                {
                    "index": index,
                    "message": self._message(choice),
                    "logprobs": self.logprobs(choice),
                    "finish_reason": self.finish_reason(choice),
                }
                for index, choice in enumerate(choices)
            ],
            "usage": usage_fields(usage),
        }
        if self._names_tier:
            completion["service_tier"] = "default"
        return to_json(completion)

    def writer(self, choices: Sequence[Choice]) -> "ChatWriter":
        """The writer of a stream of the choices."""
        empty: ChatChunk = {**self._fields, "object": "chat.completion.chunk", "choices": []}
        if self._names_tier:
            empty["service_tier"] = "default"
        if self._include_usage:
            empty["usage"] = None
        return ChatWriter(self, choices, empty, include_usage=self._include_usage)

    def finish_reason(self, choice: Choice) -> ChatFinishReason:
        """Why it has ended; "stop" where a stop string or the model's own end has cut off a call.
        Raises ApiError (500) for a choice that has not finished.
        """
        wire = wire_finish_reason(choice.finish_reason)
        if wire != "stop" or not choice.calls or choice.cut_off_call:
            return wire
        return self._calls.finish_reason

    def logprobs(self, choice: Choice) -> ChoiceLogprobs | None:
        """The log-probabilities of the tokens since the last call, if the client wants them."""
        entries = choice.take_logprobs()
        if self._tokenizer is None:
            return None
        return {"content": chat_logprobs(self._tokenizer, entries), "refusal": None}

    def _message(self, choice: Choice) -> AssistantMessage:
        """The content is null if there are calls and no text, else text, which may be empty."""
        content, reasoning, calls = choice.content, choice.reasoning, choice.calls
        message: AssistantMessage = {
            "role": "assistant",
            "content": None if calls and not content else content,
            "refusal": None,
        }
        if calls:
            self._calls.add(calls, message)
        if reasoning:  # under two names: clients read one or the other
            message["reasoning_content"] = message["reasoning"] = reasoning
        return message

    def deltas(self, steps: Sequence[Step]) -> Iterator[bytes]:
        """The JSON of the Deltas in which a stream has the steps."""
        for step in steps:
            block = step.block
            if block.kind == "call":
                if delta := self._calls.delta(step):
                    yield to_json(delta)
            elif isinstance(step, Grew):
                text = to_json(step.text)
                if block.kind == "text":
                    yield b'{"content":%b}' % text
                else:
                    yield b'{"reasoning_content":%b,"reasoning":%b}' % (text, text)


class ToolCallsForm:
    """Calls as `tool_calls`, of functions and of custom tools. The input of a custom tool is read
    from the arguments when they are complete.
    """

    finish_reason: ChatFinishReason = "tool_calls"

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._custom = {tool.name for tool in tools if tool.is_custom}

    def add(self, calls: Sequence[Block], message: AssistantMessage) -> None:
        """Add these calls to a message."""
        message["tool_calls"] = [self._call(call) for call in calls]

    def delta(self, step: Step) -> Delta | None:
        """The part of a message in which a stream has the step; None where it has none."""
        block = step.block
        index, is_custom = block.call_index, block.name in self._custom
        call: ToolCallDelta | CustomToolCallDelta
        match step:
            case Opened() if is_custom:
                custom: CustomDelta = {"name": block.name, "input": ""}
                call = {"index": index, "id": block.call_id, "type": "custom", "custom": custom}
            case Opened():
                named: FunctionDelta = {"name": block.name, "arguments": ""}
                call = {"index": index, "id": block.call_id, "type": "function", "function": named}
            case Grew() if not is_custom:
                call = {"index": index, "function": {"arguments": step.text}}
            case Closed() if is_custom:
                call = {"index": index, "custom": {"input": custom_input(block.text)}}
            case _:
                return None
        return {"tool_calls": [call]}

    def _call(self, call: Block) -> ToolCallBody | CustomToolCallBody:
        id, name = call.call_id, call.name
        if name in self._custom:
            custom: CalledCustomTool = {"name": name, "input": custom_input(call.text)}
            return {"id": id, "type": "custom", "custom": custom}
        function: CalledFunction = {"name": name, "arguments": call.text}
        return {"id": id, "type": "function", "function": function}


class FunctionCallForm:
    """The first call as `function_call`, which is all that a request with `functions` gets."""

    finish_reason: ChatFinishReason = "function_call"

    def add(self, calls: Sequence[Block], message: AssistantMessage) -> None:
        """Add the first of these calls to a message."""
        message["function_call"] = {"name": calls[0].name, "arguments": calls[0].text}

    def delta(self, step: Step) -> Delta | None:
        """The part of a message in which a stream has the step; None where it has none."""
        match step:
            case Opened(block) if block.call_index == 0:
                return {"function_call": {"name": block.name, "arguments": ""}}
            case Grew(block, text) if block.call_index == 0:
                return {"function_call": {"arguments": text}}
            case _:
                return None


_ROLE = to_json({"role": "assistant", "content": "", "refusal": None})
_NO_CONTENT = to_json({"content": ""})
_NOTHING = to_json({"index": 0, "delta": {}, "logprobs": None, "finish_reason": None})


class ChatWriter(ChunkWriter):
    """The chunks of one streamed chat completion."""

    nothing = _NOTHING

    def __init__(
        self,
        form: ChatForm,
        choices: Sequence[Choice],
        empty: ChatChunk,
        *,
        include_usage: bool,
    ) -> None:
        super().__init__(empty, include_usage=include_usage)
        self._form = form
        self._choices = choices
        self._begun = set[int]()

    def write(self, choice: int, steps: Sequence[Step]) -> bytes:
        """See StreamWriter. The first chunk of a choice has the role, the last the reason why it
        ended. The first chunk of a call has the log-probabilities of all its tokens.
        """
        answer, deltas, chunks = self._choices[choice], [*self._form.deltas(steps)], list[bytes]()
        if choice not in self._begun:
            self._begun.add(choice)
            chunks.append(self._chunk(choice, _ROLE))
        if answer.logprobs and (logprobs := self._form.logprobs(answer)):
            first = deltas.pop(0) if deltas else _NO_CONTENT
            chunks.append(self._chunk(choice, first, logprobs=to_json(logprobs)))
        chunks += [self._chunk(choice, delta) for delta in deltas]
        if answer.finish_reason is not None:
            reason = to_json(self._form.finish_reason(answer))
            chunks.append(self._chunk(choice, b"{}", reason=reason))
        return b"".join(chunks)

    def _chunk(
        self, choice: int, delta: bytes, logprobs: bytes = b"null", reason: bytes = b"null"
    ) -> bytes:
        """The parameters are JSON."""
        return self.chunk(
            b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}'
            % (choice, delta, logprobs, reason)
        )


router = Endpoints()
render_router = Endpoints()


def as_chat(body: ChatRequest, *, reasons: bool) -> Chat:
    """The older of two names counts where the newer is silent. `reasons`: whether the model does,
    in a known format. Raises ApiError (400).
    """
    return Chat(
        conversation=body.conversation,
        sampling=body,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        n=body.n,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structure=body.structure,
        parallel_calls=body.parallel_tool_calls and not body.functions,  # room for one call
        thinking_budget=body.thinking_choice.budget_of(reasons=reasons),
        prediction=body.prediction.text if body.prediction else "",
        tools_field="functions" if body.functions else "tools",
    )


@router.generation(
    "/v1/chat/completions", body=ChatRequest, answer=ChatCompletion, stream=chunks(ChatChunk)
)
def create_chat_completion(body: ChatRequest, model: ServedModel, record: RequestRecord) -> Job:
    body.log_unserved(record.id)
    request, plan = prepare_chat(as_chat(body, reasons=model.planner.reasons), model, record)
    form = ChatForm(body, model, request.id)
    writer = form.writer if body.stream else None
    return Job(model=model, requests=[request], plan=plan, render=form.whole, writer=writer)


@render_router.endpoint(
    "POST",
    "/v1/chat/completions/render",
    body=ChatRequest,
    answer=RenderedRequest,
    errors=MODEL_ERRORS,
)
async def render_chat_completion(context: Context) -> Response:
    """Refuses what a chat refuses, and generates nothing."""
    return await rendered_response(context, ChatRequest, _rendered)


def _rendered(
    body: ChatRequest, model: ServedModel, record: RequestRecord
) -> tuple[Sequence[Request], bytes]:
    request, _ = prepare_chat(as_chat(body, reasons=model.planner.reasons), model, record)
    return [request], wire_json(rendered_request(request, body, model.name))
