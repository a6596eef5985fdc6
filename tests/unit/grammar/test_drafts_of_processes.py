"""What grammar processes say along drafts is what they say token by token."""

import json
from collections.abc import Iterator

import pytest
from transformers import PreTrainedTokenizerFast

from engine.core.step import SequenceId
from engine.grammar.answers import MatcherAnswers
from engine.grammar.pool import GrammarPool
from engine.grammar.process import GrammarProcesses, Vocabulary
from engine.grammar.stage import mask_words
from engine.grammar.state import Allowed, Answer, Complete, LookAhead, Matcher
from engine.mlx_backend.loading.checkpoint import DEFAULT_CHECKPOINT
from engine.values.request import Grammar, GrammarKind
from tests.grammars import DEMO_VOCAB_SIZE, LocalGrammars, demo_tokenizer
from tests.looking_ahead import told_ahead

pytestmark = pytest.mark.process

END = 2
SECONDS = 60.0
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "kind": {"enum": ["small", "large"]}},
    "required": ["city", "kind"],
    "additionalProperties": False,
}


@pytest.fixture
def answers() -> Iterator[MatcherAnswers]:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(DEFAULT_CHECKPOINT / "tokenizer.json"))
    processes = GrammarProcesses(Vocabulary(tokenizer, DEMO_VOCAB_SIZE, frozenset({END})))
    pool = GrammarPool(processes, mask_words(DEMO_VOCAB_SIZE))
    made = MatcherAnswers(pool, lambda seconds: None)
    yield made
    made.close()


def plain(answer: Answer) -> object:
    return answer.mask.tolist() if isinstance(answer, Allowed) else answer


@pytest.mark.parametrize(
    ("kind", "text", "said", "draft", "ends"),
    [
        ("json_schema", json.dumps(SCHEMA), '{"city": "O', 'slo", "kind": "small"}', True),
        ("json_schema", json.dumps({"enum": ["yes, of course", "no"]}), '"y', "es, of", False),
        ("regex", "(ab|cd){2,5} end", "abc", "dab end", True),
        ("regex", "(ab|cd){2,5} end", "abc", "dab stop", False),
        ("lark", 'start: ("x" | "yy")* "z"', "", "xyyx", False),
    ],
)
def test_masks_along_a_draft_come_from_a_process(
    answers: MatcherAnswers, kind: str, text: str, said: str, draft: str, ends: bool
) -> None:
    tokenizer, local = demo_tokenizer(END), LocalGrammars(demo_tokenizer(END), frozenset({END}))
    matcher = Matcher(Grammar(GrammarKind(kind), text), kind, tokens=tokenizer.tokenize_str(said))
    question = LookAhead(matcher, tuple(tokenizer.tokenize_str(draft)))
    answers.look_ahead(SequenceId(0), "", question)
    answers.wait(lambda: question.answers is not None, SECONDS)
    assert question.answers is not None
    assert isinstance(matcher.answer, Allowed)
    expected = told_ahead(question, local.answer)
    assert list(map(plain, question.answers)) == list(map(plain, expected))
    assert isinstance(question.answers[-1], Complete) == ends
    for token_id in question.tokens[: len(question.answers)]:
        matcher.accept(token_id)
    answers.ask(SequenceId(0), "", matcher)
    answers.wait(lambda: matcher.answer is not None, SECONDS)
    assert matcher.answer is not None
    assert plain(matcher.answer) == plain(expected[-1])
