"""The tokens that grammars choose from."""

from typing import TYPE_CHECKING

from llguidance import LLTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Vocabulary:
    """The model's tokens, padding included, and those that the tokenizer may have beyond them."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        vocab_size: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._eos_token_ids = sorted(eos_token_ids)
        self.size = max(vocab_size, self._backend.get_vocab_size(with_added_tokens=True))

    def tokenizer(self) -> LLTokenizer:
        """For llguidance. Takes about a second for 150,000 tokens."""
        return LLTokenizer(
            self._backend.to_str(), n_vocab=self.size, eos_token=self._eos_token_ids or None
        )
