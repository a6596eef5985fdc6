"""Refuses texts that are too long for the model before they cost much."""

from tokenizers import Tokenizer

from engine.api import PromptTooLong

USUAL_CHARACTERS = 4  # of a token: a text of no more for each token of the limit may well fit
SLICE_CHARACTERS = 1 << 17
CUT_TOKENS = 64  # more than a cut through a text adds to its tokens


class PromptLimit:
    """The most tokens that a text may have.

    Tokenizing takes 200 bytes of memory and more for each character, so a text that is not likely
    to fit is counted first, slice by slice, up to the limit.
    """

    def __init__(self, backend: Tokenizer, tokens: int) -> None:
        self._backend = backend
        self._tokens = tokens
        longest_token = max(map(len, backend.get_vocab()), default=1)
        self._most_characters = 2 * longest_token  # of a token: some tokenizers drop the spaces

    def check_characters(self, characters: int) -> None:
        """Raise PromptTooLong when even the longest tokens would be too many."""
        self.check_tokens(-(-characters // self._most_characters))

    def check_tokens(self, tokens: int) -> None:
        """Raise PromptTooLong for more tokens."""
        if tokens > self._tokens:
            raise PromptTooLong(tokens)

    def check_text(self, text: str) -> None:
        """Raise PromptTooLong for texts that have more tokens."""
        self.check_characters(len(text))
        if len(text) <= self._tokens * USUAL_CHARACTERS:
            return
        at_least_tokens = 0
        for start in range(0, len(text), SLICE_CHARACTERS):
            piece = text[start : start + SLICE_CHARACTERS]
            encoding = self._backend.encode_batch_fast([piece], add_special_tokens=False)[0]
            at_least_tokens += max(len(encoding) - CUT_TOKENS, 0)
            self.check_tokens(at_least_tokens)
