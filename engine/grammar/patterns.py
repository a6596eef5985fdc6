"""JSON Schema's patterns (ECMA-262) as llguidance's regular expressions, which are Rust's."""

import re
import string
from typing import TypeAlias

_UNSPELLABLE = r"\x00-\x08\x0b\x0e-\x1f\x7f"
"""Control characters that JSON spells with \\u alone. No class holds them: llguidance drops them
where it quotes literals, and lets quotes and backslashes into classes that hold NUL."""

UNSPELLABLE = re.compile(f"[{_UNSPELLABLE}]")
"""Finds one in a text."""

MAX_PATTERN_CHARACTERS = 4096
"""The slowest patterns take a time that grows with the square of this."""

_CONTROL = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_SPACES = r"\t\n\x0b\x0c\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_CLASSES = {
    "d": "[0-9]",
    "D": "[^0-9]",
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
    "s": f"[{_SPACES}]",
    "S": f"[^{_SPACES}]",
}
_ANY = r"^\n\r\u2028\u2029"
_QUANTIFIER = re.compile(r"\{[0-9]+(,[0-9]*)?\}")
_PROPERTY = re.compile(r"[pP]\{[A-Za-z0-9_=]+\}")
_NEGATION = re.compile(r"\^")
_GROUP = re.compile(r"\((\?(:|<[A-Za-z_][A-Za-z0-9_]*>)|(?!\?))")
_CODE = re.compile(
    r"x([0-9A-Fa-f]{2})|u\{([0-9A-Fa-f]{1,6})\}"
    r"|u([dD][89abAB][0-9A-Fa-f]{2})\\u([dD][c-fC-F][0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})"
)

Atom: TypeAlias = str | int
"""Of a class: another class, as text, or one character, by its code."""


def rust_pattern(pattern: str) -> str:
    """The same pattern, as Rust's regex reads it, without what JSON can spell with \\u alone.

    Raises ValueError for what is not supported: look-arounds, back-references, word boundaries,
    flags, unknown escapes, single control characters, more than MAX_PATTERN_CHARACTERS.
    """
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        raise ValueError(f"pattern: {MAX_PATTERN_CHARACTERS} characters are the most")
    return _Translator(pattern).translated()


class _Translator:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    def translated(self) -> str:
        parts = []
        while self._at < len(self._pattern):
            parts.append(self._next())
        return "".join(parts)

    def _next(self) -> str:
        if quantifier := self._matched(_QUANTIFIER):
            return quantifier[0]
        character = self._peek()
        if character == "(":
            return self._group()
        self._take()
        if character == "[":
            return self._class()
        if character == ".":
            return f"[{_ANY}{_UNSPELLABLE}]"
        if character in "^$|*+?)":
            return character
        return self._one(self._escape() if character == "\\" else ord(character))

    def _group(self) -> str:
        if not self._matched(_GROUP):
            raise self._unsupported("look-arounds and flags")
        return "(?:"

    def _class(self) -> str:
        """Read a character class after its opening bracket."""
        negated = self._matched(_NEGATION) is not None
        items = []
        while self._peek() != "]":
            first = self._atom()
            if not self._is_range():
                items.append(first if isinstance(first, str) else _code(first))
                continue
            self._take()
            last = self._atom()
            if isinstance(first, str) or isinstance(last, str):
                items += [one if isinstance(one, str) else _code(one) for one in (first, last)]
                items.append(_code(ord("-")))
            else:
                items.append(f"{_code(first)}-{_code(last)}")
        self._take()
        inside = "".join(items)
        if negated:
            return f"[^{inside}{_UNSPELLABLE}]"
        if not inside:
            raise self._unsupported("empty classes")
        return _narrowed(f"[{inside}]")

    def _is_range(self) -> bool:
        return self._peek() == "-" and self._pattern[self._at + 1 : self._at + 2] not in {"]", ""}

    def _atom(self) -> Atom:
        character = self._take()
        if character == "\\":
            if self._peek() == "b":
                self._take()
                return ord("\b")
            return self._escape()
        return ord(character)

    def _escape(self) -> Atom:
        """Read an escape after its backslash."""
        if code := self._matched(_CODE):
            byte, long, high, low, short = code.groups()
            if high:
                return 0x10000 + (int(high, 16) - 0xD800 << 10) + int(low, 16) - 0xDC00
            return int(byte or long or short, 16)
        if name := self._matched(_PROPERTY):
            return f"[\\{name[0]}]"
        character = self._take()
        if character in _CLASSES:
            return _CLASSES[character]
        if character in _CONTROL:
            return ord(_CONTROL[character])
        if character in string.ascii_letters + string.digits:
            raise self._unsupported(f"\\{character}")
        return ord(character)

    def _one(self, atom: Atom) -> str:
        if isinstance(atom, str):
            return _narrowed(atom)
        code = _code(atom)
        if UNSPELLABLE.match(chr(atom)):
            raise self._unsupported("single control characters")
        return code

    def _matched(self, expected: re.Pattern[str]) -> re.Match[str] | None:
        found = expected.match(self._pattern, self._at)
        if found:
            self._at = found.end()
        return found

    def _peek(self) -> str:
        if self._at == len(self._pattern):
            raise self._unsupported("a pattern that is cut short")
        return self._pattern[self._at]

    def _take(self) -> str:
        character = self._peek()
        self._at += 1
        return character

    def _unsupported(self, what: str) -> ValueError:
        return ValueError(f"pattern {self._pattern[:80]!r}: not supported: {what}")


def _narrowed(of: str) -> str:
    return f"[{of}&&[^{_UNSPELLABLE}]]"


def _code(code: int) -> str:
    """One literal character."""
    if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
        raise ValueError(f"pattern: U+{code:04X} is not a character")
    character = chr(code)
    return character if character.isalnum() and character.isascii() else f"\\x{{{code:x}}}"
