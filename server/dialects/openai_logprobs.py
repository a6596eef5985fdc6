"""Log-probabilities as OpenAI's dialects have them."""

from collections.abc import Sequence

from typing_extensions import TypedDict

from engine.values.model import Tokenizer
from engine.values.output import TokenLogprob


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobBody(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(TypedDict):
    content: list[TokenLogprobBody]
    refusal: None


LOWEST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON lacks


def token_text(token: bytes) -> str:
    r"""The token as text; one that holds half a character as `bytes:\xe2\x82`, as OpenAI does."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> list[TokenLogprobBody]:
    """The log-probabilities of each of the tokens."""
    return [
        {
            **_named(entry.token_id, entry.logprob, tokenizer),
            "top_logprobs": [
                _named(token_id, logprob, tokenizer) for token_id, logprob in entry.top
            ],
        }
        for entry in entries
    ]


def _named(token_id: int, logprob: float, tokenizer: Tokenizer) -> TopLogprob:
    token = tokenizer.token_bytes(token_id)
    return {
        "token": token_text(token),
        "logprob": max(logprob, LOWEST_LOGPROB),
        "bytes": list(token),
    }
