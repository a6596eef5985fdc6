"""The words that workloads and the benchmark checkpoint share.

Every word is one token of the load tests' tokenizer, so a text of n words is n tokens, and a
text that the model wrote is encoded again to the very tokens that it sampled.
"""

from itertools import product

CONSONANTS = "bdfghjklmnprst"
VOWELS = "aeiou"
WORD_COUNT = 3697  # fills the vocabulary to exactly 4,096 entries

SYLLABLES = tuple(c + v for c, v in product(CONSONANTS, VOWELS))
WORDS = tuple(a + b for a, b in product(SYLLABLES, SYLLABLES))[:WORD_COUNT]
