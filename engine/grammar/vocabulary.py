"""The tokens that grammars choose from, as worker processes read them."""

import json
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Vocabulary:
    """The model's tokens, padding included, and any tokens that the tokenizer has beyond them."""

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
        """A file without a name that worker processes read the vocabulary from, as JSON: some 10
        MB for 150,000 tokens.
        """
        content = {
            "tokenizer": self._backend.to_str(),
            "size": self.size,
            "eos": self._eos_token_ids,
        }
        file = TemporaryFile()  # noqa: SIM115  # it is open as long as the engine runs
        file.write(json.dumps(content).encode())
        file.flush()
        return file
