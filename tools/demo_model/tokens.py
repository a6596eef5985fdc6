"""The tokenizer, and conversations as token ids, with the indices of the assistant's tokens."""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tools.demo_model.curriculum import ALL, Conversation, conversations
from tools.demo_model.words import Words

VOCAB_SIZE = 1024
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text("utf-8")
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MARKUP = ("<tool_call>", "</tool_call>")
# Spaces stand alone, so that a word is the same tokens wherever it stands and can be copied by
# looking it up; JSON's punctuation goes in runs.
_PIECES = r"""\p{L}+|\p{N}|\s|[{}\[\]",:]+(?: ["{\[]+)?|."""
SAMPLES = 20_000


@dataclass(frozen=True, slots=True)
class Sample:
    """A conversation's token ids, and the indices of the assistant's, which are trained."""

    ids: Sequence[int]
    said: Sequence[int]


def train_tokenizer(words: Words, seed: int, n_samples: int = SAMPLES) -> PreTrainedTokenizerFast:
    """Train byte-level BPE on `n_samples` conversations of the curriculum."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(_MARKUP),
        special_tokens=[AddedToken(token, normalized=False) for token in _SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    samples = islice(conversations(ALL, words, random.Random(seed)), n_samples)
    tokenizer.train_from_iterator(_texts(samples), trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in _MARKUP])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def sample(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> Sample:
    """The conversation as the chat template renders it."""
    ids: list[int] = tokenizer.apply_chat_template(
        list(conversation.messages), tools=list(conversation.tools) or None, return_dict=False
    )
    return Sample(ids, _said(ids, tokenizer))


def _said(ids: Sequence[int], tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The indices after each `<|im_start|>assistant\\n`, up to and including its `<|im_end|>`."""
    opening = tokenizer.encode("<|im_start|>assistant\n")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    said: list[int] = []
    speaking = False
    for index, token in enumerate(ids):
        if speaking:
            said.append(index)
            speaking = token != end
        else:
            speaking = list(ids[max(index - len(opening) + 1, 0) : index + 1]) == opening
    return said


def _texts(conversations: Iterable[Conversation]) -> Iterable[str]:
    for conversation in conversations:
        yield json.dumps([conversation.messages, conversation.tools], ensure_ascii=False)
