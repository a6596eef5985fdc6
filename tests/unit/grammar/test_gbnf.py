"""GBNF, written as Lark for llguidance, allows the texts that llama.cpp's reading of it allows."""

from itertools import product
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from engine.grammar.gbnf import lark_of
from engine.grammar.worker import GrammarError, compile_grammar

BYTES = LLTokenizer("byte")

ARITHMETIC = r"""
# a sum
root   ::= (expr "=" term "\n")+   # and its result
expr   ::= term ([-+*/] term)*
term   ::= number | "(" expr ")" |
  Name-1
Name-1 ::= [a-z] [a-z0-9_]*
number ::= [0-9]{1,3}
"""


def allows(grammar: str, text: str) -> bool:
    matcher = compile_grammar(BYTES, "gbnf", grammar)
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "text", "is_allowed"),
    [
        (ARITHMETIC, "1+22*(x_1-y)=333\n", True),
        (ARITHMETIC, "1=2\n3=4\n", True),
        (ARITHMETIC, "1+=2\n", False),
        (ARITHMETIC, "1=2222\n", False),
        ('root ::= [a] [b] "c" | "ab" "d"', "abc", True),
        ('root ::= "a" "ab" | "aa" "c"', "aac", True),
        ('root ::= "a"*', "", True),
        ("root ::= . .", "\né", True),
        (r'root ::= "\u00e9\x41\"\\\t" [\]\-\U0001F600]', 'éA"\\\t]', True),
        ("root ::= [^a-c\\n]+", "d/é", True),
        ("root ::= [^a-c\\n]+", "db", False),
        ("root ::= [a-]", "-", True),
        ('root ::= "a"{2}', "aa", True),
        ('root ::= "a"{2}', "aaa", False),
        ('root ::= "a"{2,}', "aaaaa", True),
        ('root ::= ("a" | b)? "c"\nb ::= "b" root', "bbcc" + "c" * 0, False),
        ('root ::= ("a" | b)? "c"\nb ::= "b" root', "bbccc", True),
    ],
)
def test_texts(grammar: str, text: str, is_allowed: bool) -> None:
    assert allows(grammar, text) is is_allowed


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ("", "'root' is not defined"),
        ('other ::= "a"', "'root' is not defined"),
        ("root ::= other", "'other' is not defined"),
        ('root ::= "a"\nroot ::= "b"', "defined twice"),
        ('root ::= ("a"', "')' is missing"),
        ('root ::= "a")', "no part of a rule"),
        ('root ::= "a', "has no end"),
        ("root ::= [a", "has no end"),
        ("root ::= []", "is empty"),
        ("root ::= [b-a]", "ends before it begins"),
        (r'root ::= "\q"', "escape is not known"),
        (r'root ::= "\UFFFFFFFF"', "no such character"),
        (r'root ::= "\uD800"', "surrogates"),
        ('root ::= "a"{x}', "a repetition is"),
        ('root ::= "a"{3,2}', "below its smallest"),
        ("root ::= <think>", "is expected"),
        ("root = 1", "'::=' is missing"),
        ("root ::= " + "(" * 10_000, "recursion"),
    ],
)
def test_what_is_no_gbnf_is_refused_with_the_reason(grammar: str, problem: str) -> None:
    with pytest.raises(GrammarError, match=problem.replace("(", r"\(").replace(")", r"\)")):
        compile_grammar(BYTES, "gbnf", grammar)


Parts: TypeAlias = list[list[tuple[str, str]]]

MOST = 4
COUNTS = {
    "": (1, 1),
    "?": (0, 1),
    "*": (0, MOST),
    "{1,2}": (1, 2),
    "{0}": (0, 0),
    "{0,0}": (0, 0),
    "{00,01}": (0, 1),
}

ALTERNATIVES = st.lists(
    st.lists(
        st.tuples(
            st.sampled_from(['"a"', '"ab"', "[ab]", "[^a]", "one", '""']),
            st.sampled_from(list(COUNTS)),
        ),
        max_size=3,
    ),
    min_size=1,
    max_size=3,
)
CHARACTERS = {'"a"': ["a"], '"ab"': ["ab"], "[ab]": ["a", "b"], "[^a]": ["b"], '""': [""]}
NOTHING = '""'


def texts(parts: Parts, one: Parts) -> set[str]:
    """All texts of at most MOST of the letters a and b."""
    found = set[str]()
    for sequence in parts:
        made = {""}
        for atom, count in sequence:
            texts_of_one = texts(one, []) if atom == "one" else set(CHARACTERS[atom])
            least, most = COUNTS[count]
            repeated = {""}
            allowed = {""} if least == 0 else set[str]()
            for index in range(most):
                repeated = {a + b for a in repeated for b in texts_of_one if len(a + b) <= MOST}
                if index + 1 >= least:
                    allowed |= repeated
            made = {a + b for a in made for b in allowed if len(a + b) <= MOST}
        found |= made
    return found


@given(root=ALTERNATIVES, one=ALTERNATIVES)
def test_the_texts_are_those_of_the_grammar(root: Parts, one: Parts) -> None:
    """No lexeme that is longer hides a text."""
    one = [[(atom, count) for atom, count in parts if atom != "one"] for parts in one]
    rules = {"root": root, "one": one}
    grammar = "\n".join(
        f"{name} ::= {' | '.join(' '.join(map(''.join, parts)) or NOTHING for parts in rule)}"
        for name, rule in rules.items()
    )
    expected = texts(root, one)
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(lark_of(grammar)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    for length in range(MOST + 1):
        for letters in product("ab", repeat=length):
            text = "".join(letters)
            fresh = matcher.deep_copy()
            tokens = list(text.encode())
            taken = fresh.try_consume_tokens(tokens) == length and fresh.is_accepting()
            assert taken is (text in expected), (grammar, text)
