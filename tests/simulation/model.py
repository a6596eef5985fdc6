"""A language model made of hashes, so that a wrong KV value anywhere changes every later token.

The KV of a position is `chain(KV of the position before, its token)`; the next token is a function
of the last KV and of the sample order. What a request must generate follows from its prompt and its
adapter alone.
"""

from array import array
from collections.abc import Sequence
from itertools import chain as joined
from typing import NamedTuple

from blake3 import blake3

from engine.core.request import Namespaces
from engine.values.images import Image, ImageInput, PreparedImage
from engine.values.request import Request
from kvstore.tokens import content_ids

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
ROOT = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


ADAPTERS = {"red": "fingerprint of red", "blue": "fingerprint of blue"}
"""Their fingerprints by name."""

SALTS = ("", "salt")
NAMESPACES = Namespaces(fingerprints=ADAPTERS)

_READ_AS = {fingerprint: 1000 * n for n, fingerprint in enumerate(("", *ADAPTERS.values()))}
"""By fingerprint: with an adapter the model computes what it would of tokens so much higher."""


IMAGE_SIZES = (1, 2, 3, 5, 5, 7)
"""Tokens of the images that requests have."""

DIGESTS = tuple(blake3(b"image %d" % n).digest() for n in range(len(IMAGE_SIZES)))
NAMES = tuple(joined.from_iterable(map(content_ids, DIGESTS, IMAGE_SIZES)))
"""The ids of all their parts."""

MAX_IMAGE_TOKENS, N_STAGES = 8, 3


def image_input(vocab_size: int, feature_bytes: int) -> ImageInput:
    """The last token of the vocabulary stands for parts of images, and is a token as any other."""
    return ImageInput(vocab_size - 1, MAX_IMAGE_TOKENS, N_STAGES, 1, feature_bytes)


def prepared_image(number: int, vocab_size: int, is_whole: bool) -> PreparedImage:
    """One of the images. Every other one has two runs, with a token between them."""
    size, part = IMAGE_SIZES[number], vocab_size - 1
    runs: tuple[tuple[int, int], ...] = ((0, size),)
    tokens = (part,) * size
    if number % 2 and size > 2:
        runs, tokens = ((0, 2), (3, size - 2)), (part, part, 0, *(part,) * (size - 2))
    return PreparedImage(Image(DIGESTS[number], runs, (size,), "", is_whole), tokens)


def read_ids(request: Request) -> list[int]:
    """What the model reads of a prompt: parts of images in place of the tokens that stand for
    them.
    """
    ids = list(request.prompt)
    for image in request.images:
        names = iter(content_ids(image.digest, image.n_tokens))
        for position in positions_of(image):
            ids[position] = next(names)
    return ids


def positions_of(image: Image) -> list[int]:
    """The positions of an image's parts."""
    return [at for first, n_tokens in image.runs for at in range(first, first + n_tokens)]


def fingerprint(adapter: str) -> str:
    """Of the adapter of that name; "" for none."""
    return ADAPTERS[adapter] if adapter else ""


def chain(previous: int, token_id: int, adapter: str = "") -> int:
    """The KV behind `previous`: splitmix64 of both, and of the adapter with this fingerprint."""
    z = (previous + 0x9E3779B97F4A7C15 * (token_id + _READ_AS[adapter] + 1)) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def token_between(previous: int, own: int, vocab_size: int, adapter: str) -> int:
    """The token, or the part of an image, whose KV is `own` behind `previous`. Raises StopIteration
    if there is none.
    """
    ids: list[int] = [*range(vocab_size), *NAMES]
    return next(token_id for token_id in ids if chain(previous, token_id, adapter) == own)


def packed(numbers: Sequence[int], size: int) -> bytes:
    """As bytes, with zeros behind them."""
    return array("Q", [*numbers, *[0] * (size - len(numbers))]).tobytes()


def unpacked(data: bytes) -> list[int]:
    return array("Q", data).tolist()


def next_token(kv: int, seed: int, output_index: int, vocab_size: int) -> int:
    """With one seed of four a text repeats itself, but for every eighth token or so."""
    if seed % 4 == 1 and kv % 8:
        return (5 * output_index + seed) % min(vocab_size, 11)
    return chain(chain(kv, seed & _MASK), output_index) % vocab_size


def pooled_number(kv: int) -> int:
    """What pooling makes of a position: small, so that float32 adds these up exactly."""
    return kv % 997


def text_of(token_ids: list[int]) -> str:
    return "".join(ALPHABET[token_id % len(ALPHABET)] for token_id in token_ids)


def sample(kv: int, seed: int, output_index: int, vocab_size: int, banned: frozenset[int]) -> int:
    """The first token, counting up from `next_token`, that is not banned."""
    token_id = next_token(kv, seed, output_index, vocab_size)
    while token_id in banned:
        token_id = (token_id + 1) % vocab_size
    return token_id


class State(NamedTuple):
    """A recurrent state: the last token's KV, and where it was rounded on the way there."""

    kv: int = ROOT
    roundings: int = ROOT  # a chain of the KV at each
    rounded_at: int = ROOT  # the KV at the last one

    def rounded(self) -> "State":
        return State(self.kv, chain(self.roundings ^ self.kv, 0), self.kv)
