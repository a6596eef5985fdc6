"""What is asked of a chat's next answer, whatever dialect it was asked in."""

from dataclasses import dataclass

from engine.values.request import Grammar
from server.generation.conversation import Conversation
from server.generation.request_fields import SampledRequest

Structure = tuple[str, Grammar]
"""What an answer must be, behind the name of the field that says so, for errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation, and how it is to be answered. Each dialect reads its bodies into one."""

    conversation: Conversation
    sampling: SampledRequest
    max_tokens: int | None = None  # None and -1: as many as there is room for
    n: int = 1
    logprobs: int | None = None  # how many alternatives of each token; None: no logprobs
    structure: Structure | None = None
    parallel_calls: bool = True
    thinking_budget: int | None = None
    prediction: str = ""  # what the answer is expected to be like
    tools_field: str = "tools"  # from which they come, for errors
