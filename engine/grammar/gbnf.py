"""GBNF, the notation of llama.cpp's grammars and, as EBNF, of xgrammar's, written as Lark.

Each character is a lexeme of its own: llguidance's lexer takes the longest lexeme, which would
leave out texts where a shorter one is needed.
"""

import json
import re
import sys

_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_DEFINED = re.compile(r"[ \t]*::=")
_COUNT = re.compile(r"\{[ \t]*(\d{1,9})[ \t]*(?:(,)[ \t]*(\d{1,9})?[ \t]*)?\}")
_HEXADECIMAL = re.compile(r"x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}")
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_ANY_CHARACTER = "/(?s:.)/"
_CLOSED = re.compile(r"\)")
_EMPTY = '""'
_NEVER = ("{0}", "{0,0}")  # Lark has no such repetition
_ROOT = "root"


def lark_of(text: str) -> str:
    """The grammar as Lark, its rule `root` as `start`. Raises ValueError, or RecursionError where
    it is nested too deeply.
    """
    return _Writer(text).grammar()


class _Writer:
    """Reads a grammar once and writes each rule as it is read."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._rules: dict[str, str] = {}
        self._names: dict[str, str] = {_ROOT: "start"}

    def grammar(self) -> str:
        self._take(_SPACE_AND_LINES)
        while self._at < len(self._text):
            name = self._name("a rule's name")
            if not self._take(_DEFINED):
                raise self._error("'::=' is missing")
            self._take(_SPACE_AND_LINES)
            if name in self._rules:
                raise ValueError(f"the rule '{name}' is defined twice")
            self._rules[name] = self._alternatives(_SPACE)
            if self._next not in "\r\n":
                raise self._error("this is no part of a rule")
            self._take(_SPACE_AND_LINES)
        for name in self._names:
            if name not in self._rules:
                raise ValueError(f"the rule '{name}' is not defined")
        return "\n".join(f"{self._named(name)}: {rule}" for name, rule in self._rules.items())

    def _alternatives(self, space: re.Pattern[str]) -> str:
        """Sequences, the last of which ends with what `space` does not pass over."""
        found = [self._sequence(space)]
        while self._next == "|":
            self._at += 1
            self._take(_SPACE_AND_LINES)
            found.append(self._sequence(space))
        return " | ".join(found)

    def _sequence(self, space: re.Pattern[str]) -> str:
        parts = list[str]()
        self._take(space)
        while self._next not in "|)\r\n":
            part = self._part()
            self._take(space)
            while count := self._repetition():
                part = _EMPTY if count in _NEVER else f"({part}){count}"
                self._take(space)
            parts.append(part)
        return " ".join(parts) or _EMPTY

    def _part(self) -> str:
        match self._next:
            case '"':
                self._at += 1
                characters = list[str]()
                while self._next != '"':
                    characters.append(json.dumps(self._character(), ensure_ascii=False))
                self._at += 1
                return f"({' '.join(characters) or _EMPTY})"
            case "[":
                return self._class()
            case ".":
                self._at += 1
                return _ANY_CHARACTER
            case "(":
                self._at += 1
                inner = self._alternatives(_SPACE_AND_LINES)
                if not self._take(_CLOSED):
                    raise self._error("')' is missing")
                return f"({inner})"
        return self._named(self._name("a rule, a text or a class of characters"))

    def _class(self) -> str:
        self._at += 1
        is_negated = self._next == "^"
        self._at += is_negated
        ranges = list[str]()
        while self._next != "]":
            first = last = self._character()
            if self._next == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last = self._character()
            if last < first:
                raise self._error("a range of characters ends before it begins")
            ranges.append(f"\\x{{{ord(first):X}}}-\\x{{{ord(last):X}}}")
        self._at += 1
        if not ranges:
            if is_negated:
                return _ANY_CHARACTER
            raise self._error("a class of characters is empty")
        return f"/[{'^' * is_negated}{''.join(ranges)}]/"

    def _character(self) -> str:
        """One character of a text or a class."""
        if self._at >= len(self._text):
            raise self._error("a text or a class of characters has no end")
        character = self._text[self._at]
        self._at += 1
        if character != "\\":
            return character
        if digits := self._take(_HEXADECIMAL):
            if (code := int(digits[1:], 16)) > sys.maxunicode:
                raise self._error("there is no such character before this")
            return chr(code)
        escaped = _ESCAPED.get(self._text[self._at : self._at + 1])
        if escaped is None:
            raise self._error("this escape is not known")
        self._at += 1
        return escaped

    def _repetition(self) -> str:
        """The repetition that follows, as Lark has it; "" where there is none."""
        if self._next and self._next in "*+?":
            self._at += 1
            return self._text[self._at - 1]
        if self._next != "{":
            return ""
        found = _COUNT.match(self._text, self._at)
        if found is None:
            raise self._error("a repetition is {m}, {m,} or {m,n}")
        self._at = found.end()
        least, comma, most = found.groups()
        if most and int(most) < int(least):
            raise self._error("a repetition's largest number is below its smallest")
        return f"{{{int(least)}{comma or ''}{int(most) if most else ''}}}"

    def _name(self, wanted: str) -> str:
        if not (name := self._take(_NAME)):
            raise self._error(f"{wanted} is expected")
        return name

    def _named(self, name: str) -> str:
        """The name that a rule has in Lark, where names have no hyphens and no capitals."""
        return self._names.setdefault(name, f"rule_{len(self._names)}")

    @property
    def _next(self) -> str:
        """The next character; a line's end after the last."""
        return self._text[self._at : self._at + 1] or "\n"

    def _take(self, pattern: re.Pattern[str]) -> str:
        """What matches here, which is passed over; "" where nothing does."""
        found = pattern.match(self._text, self._at)
        if found is None:
            return ""
        self._at = found.end()
        return found[0]

    def _error(self, problem: str) -> ValueError:
        line = self._text.count("\n", 0, self._at) + 1
        return ValueError(f"line {line} of the GBNF: {problem}: {self._text[self._at :][:20]!r}")
