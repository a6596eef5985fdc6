"""A body of chat completions as the chat that it asks for."""

from server.generation.chat import Chat
from server.schemas.chat import ChatRequest


def as_chat(body: ChatRequest) -> Chat:
    """The older of two names counts where the newer is silent."""
    return Chat(
        conversation=body.conversation,
        sampling=body,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        n=body.n,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structure=body.structure,
        parallel_calls=body.parallel_tool_calls and not body.functions,  # room for one call
        thinking_budget=body.thinking_budget,
        prediction=body.prediction.text if body.prediction else "",
        tools_field="functions" if body.functions else "tools",
    )
