"""What of a JSON text is seen to before anything is made of it: its size, and half characters."""

import re
from dataclasses import dataclass

import numpy as np

MAX_NODES = 100_000
"""Objects, lists and members of objects. A byte or two of each would become hundreds."""
MAX_ITEMS = 1 << 20
"""Commas: about as many numbers and texts. Reading a number takes 40 ns, in which no other thread
runs."""
MAX_DIGITS = 511
"""Of one number. Python takes quadratic time to write a long one."""

DIGITS_BYTES = (MAX_DIGITS + 1) // 2
"""Of texts that are cut into blocks of this many bytes, a number of more than MAX_DIGITS digits
covers at least one whole block.
"""

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class JsonSize:
    """`nodes` are objects, lists and members; `commas` are those outside texts."""

    nodes: int
    commas: int
    has_long_number: bool


def check_json_size(*texts: bytes) -> None:
    """Raise ValueError, in words for a client, for JSON texts that together have too many parts to
    be read.
    """
    nodes = commas = 0
    for text in texts:
        if len(text) <= MAX_DIGITS:
            nodes += sum(map(text.count, PARTS))
            continue
        size = json_size(text)
        if size.has_long_number:
            raise ValueError(f"has a number of too many digits: at most {MAX_DIGITS}")
        nodes += size.nodes
        commas += size.commas
    if nodes > MAX_NODES:
        limit = f"at most {MAX_NODES} objects, lists and members of objects"
        raise ValueError(f"has too many parts: {limit}")
    if commas > MAX_ITEMS:
        raise ValueError(f"has too many parts: at most {MAX_ITEMS} items of lists")


PARTS = (b"{", b"[", b":", b",")
"""What nodes and items begin or end with. Within texts they are none: their number is a bound."""


def json_size(text: bytes) -> JsonSize:
    """The size of a JSON text; of other bytes, some size.

    Counted by numpy, which lets other threads run meanwhile as a parser does not. A number that
    fills a whole block of MAX_DIGITS / 2 bytes is long: of more than MAX_DIGITS digits each does,
    and of fewer some.
    """
    unescaped = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    nodes = commas = 0
    has_long_number = is_inside = False
    for start in range(0, len(unescaped), _CHUNK_BYTES):
        characters = np.frombuffer(unescaped, np.uint8)[start : start + _CHUNK_BYTES]
        inside = np.logical_xor.accumulate(characters == ord('"'))
        if is_inside:
            np.logical_not(inside, out=inside)
        is_inside = bool(inside[-1])
        outside = np.logical_not(inside, out=inside)
        starts = (characters == ord("[")) | (characters == ord("{")) | (characters == ord(":"))
        nodes += int(np.count_nonzero(starts & outside))
        commas += int(np.count_nonzero((characters == ord(",")) & outside))
        digits = (characters >= ord("0")) & (characters <= ord("9")) & outside
        whole = len(digits) - len(digits) % DIGITS_BYTES
        has_long_number |= bool(digits[:whole].reshape(-1, DIGITS_BYTES).all(axis=1).any())
    return JsonSize(nodes, commas, has_long_number)


_ESCAPES = re.compile(
    r"\\\\"  # a backslash
    r"|\\u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w"  # a character in two halves
    r"|(?P<half>\\u[dD][89a-fA-F]\w\w)"
)


def whole_characters(text: str) -> str:
    """JSON text, with U+FFFD in place of escapes of half a character, which UTF-8 cannot have."""
    return _ESCAPES.sub(lambda match: r"\ufffd" if match["half"] else match[0], text)
