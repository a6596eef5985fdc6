"""Log-probabilities in OpenAI's two shapes."""

import codecs
from collections.abc import Sequence

from engine.values.model import Tokenizer
from engine.values.output import TokenLogprob
from server.schemas.chat import ChoiceLogprobs, TokenLogprobBody, TopLogprob
from server.schemas.completions import CompletionLogprobs

LOWEST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON lacks


def token_text(token: bytes) -> str:
    r"""The token as text; one that holds half a character as `bytes:\xe2\x82`, as OpenAI does."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> ChoiceLogprobs:
    return ChoiceLogprobs(
        content=[
            TokenLogprobBody(
                **_named(entry.token_id, entry.logprob, tokenizer),
                top_logprobs=[
                    TopLogprob(**_named(token_id, logprob, tokenizer))
                    for token_id, logprob in entry.top
                ],
            )
            for entry in entries
        ],
        refusal=None,
    )


def _named(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, object]:
    token = tokenizer.token_bytes(token_id)
    return {
        "token": token_text(token),
        "logprob": max(logprob, LOWEST_LOGPROB),
        "bytes": list(token),
    }


class CompletionLogprobBuilder:
    """Logprobs of one choice, whole or chunk by chunk: `text_offset` counts on through chunks.

    Offsets are in characters from the beginning of the choice's text, echoed prompt included; a
    token that continues a character has the offset behind that character's beginning.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def prompt(
        self, prompt: Sequence[int], entries: Sequence[TokenLogprob | None]
    ) -> CompletionLogprobs:
        """The echoed prompt's. Its first token was not predicted: its entries are null."""
        tokens = zip(prompt, entries, strict=True)
        return self._lists([(token_id, entry) for token_id, entry in tokens])

    def output(self, entries: Sequence[TokenLogprob]) -> CompletionLogprobs:
        return self._lists([(entry.token_id, entry) for entry in entries])

    def _lists(self, tokens: Sequence[tuple[int, TokenLogprob | None]]) -> CompletionLogprobs:
        lists = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token_id, entry in tokens:
            token = self._tokenizer.token_bytes(token_id)
            lists.tokens.append(token_text(token))
            lists.text_offset.append(self._characters)
            self._characters += len(self._decoder.decode(token))
            lists.token_logprobs.append(max(entry.logprob, LOWEST_LOGPROB) if entry else None)
            lists.top_logprobs.append(self._top(entry) if entry else None)
        return lists

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """Best first, then the token itself; where two read the same the better one stays."""
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            text = token_text(self._tokenizer.token_bytes(token_id))
            top.setdefault(text, max(logprob, LOWEST_LOGPROB))
        return top


def joined(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    """The parts' lists one after the other."""
    return CompletionLogprobs(
        tokens=[token for part in parts for token in part.tokens],
        token_logprobs=[logprob for part in parts for logprob in part.token_logprobs],
        top_logprobs=[top for part in parts for top in part.top_logprobs],
        text_offset=[offset for part in parts for offset in part.text_offset],
    )
