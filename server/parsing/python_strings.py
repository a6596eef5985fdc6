"""Python string literals, converted to JSON while they stream."""

import re

from server.parsing.literals import WriteJson, quoted
from server.parsing.reader import Reader, Reading

_PIECE = re.compile(  # plain text, an escape, or what may be a quote
    r"[^\\'\"]+"
    r"|\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|[\s\S]?)"
    r"|['\"]"
)
_UNFINISHED = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|[0-7]{1,2})?")
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": ""}
_SAME = "\\'\"/"  # the slash as in JSON, which some write
_BEHIND = re.compile(r"\s{0,64}(?:([,)\]}:=])|\Z)")


def read_python_string(reader: Reader, quote: str, part: WriteJson) -> Reading[bool]:
    """See ReadString.

    Templates do not escape what they put between quotes. So a quote ends a string only where a
    comma, a colon, a bracket or `=` follows, as it does in all of Python's literals.
    """
    yield part('"')
    while True:
        text, end, is_over = _scan(reader.text, quote, reader.is_closed)
        reader.take(end)
        if text:
            yield part(quoted(text))
        if is_over:
            yield part('"')
            return True
        if reader.is_closed:
            return False
        yield None


def _scan(text: str, quote: str, is_closed: bool) -> tuple[str, int, bool]:
    """What the text says that is certain, where that ends, and whether the string does there."""
    said: list[str] = []
    at = 0
    while match := _PIECE.match(text, at):
        piece, end = match[0], match.end()
        if piece[0] == "\\":
            if not is_closed and _UNFINISHED.fullmatch(text, at):
                break
            piece = _unescaped(piece[1:])
        elif text.startswith(quote, at):
            if behind := _BEHIND.match(text, at + len(quote)):
                is_over = is_closed or bool(behind[1])
                return "".join(said), at + len(quote) if is_over else at, is_over
        elif quote.startswith(text[at : at + len(quote)]) and not is_closed:
            break
        said.append(piece)
        at = end
    return "".join(said), at, False


def _unescaped(escape: str) -> str:
    """What an escape stands for, its backslash left out. One that is unknown stands for itself."""
    if escape[:1] in ("x", "u", "U") and len(escape) > 1:
        code = int(escape[1:], 16)
        return chr(code) if code < 0x110000 else "\\" + escape
    if escape.isascii() and escape.isdigit() and escape[0] < "8":
        return chr(int(escape, 8))
    if escape in _SAME:
        return escape
    return _SIMPLE.get(escape, "\\" + escape)
