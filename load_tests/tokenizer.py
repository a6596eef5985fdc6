"""A tokenizer that is built, not trained: a word of the lexicon with its space is one token.

So n words are n tokens, and words that a model sampled are encoded again to the tokens they were.
"""

from collections.abc import Iterator, Sequence
from itertools import islice, product
from string import ascii_uppercase

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

CONSONANTS = "bdfghjklmnprst"
VOWELS = "aeiou"
WORD_COUNT = 3697  # fills the vocabulary to exactly 4,096 entries

SYLLABLES = tuple(c + v for c, v in product(CONSONANTS, VOWELS))
WORDS = tuple(a + b for a, b in product(SYLLABLES, SYLLABLES))[:WORD_COUNT]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPACE = "Ġ"  # a space in byte-level BPE's alphabet


def build_tokenizer(vocab_size: int = 0, special: Sequence[str] = SPECIAL_TOKENS) -> Tokenizer:
    """Byte-level BPE whose merges are: syllables, syllables with a space, words with a space, and
    capitals by twos and fours until there are `vocab_size` tokens with the special ones.
    """
    syllables = [(s[0], s[1]) for s in SYLLABLES]
    endings = [(s, SPACE) for s in SYLLABLES]
    words = [(w[:2], w[2:] + SPACE) for w in WORDS]
    merges = syllables + endings + words
    n_bytes = len(pre_tokenizers.ByteLevel.alphabet())
    missing = vocab_size - n_bytes - len(merges) - len(special)
    merges += list(islice(_capitals(), max(missing, 0)))
    entries = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in merges]
    tokenizer = Tokenizer(models.BPE({entry: i for i, entry in enumerate(entries)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{L}+ ?|[^\p{L}]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in special])
    return tokenizer


def _capitals() -> Iterator[tuple[str, str]]:
    pairs = [(a, b) for a in ascii_uppercase for b in ascii_uppercase]
    yield from pairs
    for first, second in product(pairs, repeat=2):
        yield "".join(first), "".join(second)


def word_ids(tokenizer: Tokenizer) -> list[int]:
    """Token ids of the lexicon's words."""
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[word + SPACE] for word in WORDS]
