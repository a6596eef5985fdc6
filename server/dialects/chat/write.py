"""Chat completions, whole and streamed, and the shapes in which they contain calls."""

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import to_json

from engine.values.request import Request
from server.dialects.chat.schema import ChatRequest
from server.dialects.job import Job
from server.dialects.openai import (
    ChunkWriter,
    chat_logprobs,
    response_fields,
    usage_fields,
    wire_finish_reason,
)
from server.generation.choice import AnswerUsage, Block, Choice, Closed, Grew, Opened, Step
from server.generation.plan import AnswerPlan
from server.generation.requests import ServedModel
from server.generation.tools import ChatCustomTool, custom_input


def chat_job(body: ChatRequest, model: ServedModel, request: Request, plan: AnswerPlan) -> Job:
    """The job of a chat completion, which the client reads whole or as a stream."""
    form = ChatForm(body, model, request.id)
    return Job(
        model=model,
        requests=[request],
        plan=plan,
        render=form.whole,
        writer=form.writer if body.stream else None,
    )


class ChatForm:
    """How one request's completions are written. It keeps nothing else of the body.

    Calls are `tool_calls`, of functions and of custom tools. The input of a custom tool is read
    from the arguments when they are complete. For a request with `functions`, a message has one
    `function_call`, the first.
    """

    def __init__(self, body: ChatRequest, model: ServedModel, id: str) -> None:
        self._fields = response_fields("chatcmpl", id, model)
        self._tier = {} if body.service_tier is None else {"service_tier": "default"}
        self._with_usage = body.include_usage
        self._tokenizer = model.engine.tokenizer if body.logprobs else None
        self._is_legacy = bool(body.functions)
        self._custom = frozenset(
            tool.custom.name for tool in body.tools if isinstance(tool, ChatCustomTool)
        )

    def whole(self, choices: Sequence[Choice], usage: AnswerUsage) -> bytes:
        """The JSON of a ChatCompletion."""
        completion = {
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
            **self._tier,
        }
        return to_json(completion)

    def writer(self, choices: Sequence[Choice]) -> "ChatWriter":
        """The writer of a stream of the choices."""
        usage = {"usage": None} if self._with_usage else {}
        fields = {**self._fields, "object": "chat.completion.chunk", **self._tier, **usage}
        return ChatWriter(self, choices, fields, with_usage=self._with_usage)

    def finish_reason(self, choice: Choice) -> str:
        """Raises ApiError (500) for a choice that has not finished."""
        wire = wire_finish_reason(choice.finish_reason)
        if wire != "stop" or not choice.calls:
            return wire
        return "function_call" if self._is_legacy else "tool_calls"

    def logprobs(self, choice: Choice) -> dict[str, Any] | None:
        """The JSON of the tokens' ChoiceLogprobs since the last call, if the client wants them."""
        entries = choice.take_logprobs()
        if self._tokenizer is None:
            return None
        return {"content": chat_logprobs(self._tokenizer, entries), "refusal": None}

    def _message(self, choice: Choice) -> dict[str, Any]:
        """The content is null if there are calls and no text, else text, which may be empty."""
        content, reasoning, calls = choice.content, choice.reasoning, choice.calls
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not content else content,
            "refusal": None,
        }
        if calls and self._is_legacy:
            message["function_call"] = {"name": calls[0].name, "arguments": calls[0].text}
        elif calls:
            message["tool_calls"] = [self._tool_call(call) for call in calls]
        if reasoning:  # under two names: clients read one or the other
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        return message

    def _tool_call(self, call: Block) -> dict[str, Any]:
        if call.name in self._custom:
            custom = {"name": call.name, "input": custom_input(call.text)}
            return {"id": call.call_id, "type": "custom", "custom": custom}
        function = {"name": call.name, "arguments": call.text}
        return {"id": call.call_id, "type": "function", "function": function}

    def deltas(self, steps: Sequence[Step]) -> Iterator[bytes]:
        """The JSON of the Deltas in which a stream has the steps."""
        for step in steps:
            block = step.block
            if block.kind == "call":
                delta = self._legacy_delta(step) if self._is_legacy else self._call_delta(step)
                if delta is not None:
                    yield to_json(delta)
            elif isinstance(step, Grew):
                text = to_json(step.text)
                if block.kind == "text":
                    yield b'{"content":%b}' % text
                else:
                    yield b'{"reasoning_content":%b,"reasoning":%b}' % (text, text)

    def _call_delta(self, step: Step) -> dict[str, Any] | None:
        block = step.block
        is_custom, delta = block.name in self._custom, dict[str, Any]()
        match step:
            case Opened():
                kind, text = ("custom", "input") if is_custom else ("function", "arguments")
                named = {"name": block.name, text: ""}
                delta = {"id": block.call_id, "type": kind, kind: named}
            case Grew() if not is_custom:
                delta = {"function": {"arguments": step.text}}
            case Closed() if is_custom:
                delta = {"custom": {"input": custom_input(block.text)}}
        return {"tool_calls": [{"index": block.call_index, **delta}]} if delta else None

    def _legacy_delta(self, step: Step) -> dict[str, Any] | None:
        match step:
            case Opened(block) if block.call_index == 0:
                return {"function_call": {"name": block.name, "arguments": ""}}
            case Grew(block, text) if block.call_index == 0:
                return {"function_call": {"arguments": text}}
            case _:
                return None


_ROLE = to_json({"role": "assistant", "content": "", "refusal": None})
_NO_CONTENT = to_json({"content": ""})


class ChatWriter(ChunkWriter):
    """The chunks of one streamed chat completion."""

    def __init__(
        self,
        form: ChatForm,
        choices: Sequence[Choice],
        fields: dict[str, Any],
        *,
        with_usage: bool,
    ) -> None:
        super().__init__(fields, with_usage=with_usage)
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
