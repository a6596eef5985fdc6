"""The tokens that grammars choose from."""

import json
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, BinaryIO

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

    def file(self) -> BinaryIO:
        """What grammar processes read of it; some 10 MB for 150,000 tokens. It has no name."""
        told = {
            "tokenizer": self._backend.to_str(),
            "size": self.size,
            "eos": self._eos_token_ids,
        }
        file = TemporaryFile()  # noqa: SIM115  # it lives as long as the engine
        file.write(json.dumps(told).encode())
        file.flush()
        return file
