"""Rows that sit steps out, for nobody knows yet what may follow, say what they say otherwise."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random

import mlx.core as mx
import pytest
from llguidance import LLTokenizer

from engine.core.step import NO_STEP_MASKS, Late, Resample, Sampled, StepMasks, StepPlan
from engine.grammar.answers import Verdict
from engine.grammar.phases import grammar_plan
from engine.mlx_backend.decode.choice import DecodePath
from engine.mlx_backend.model.attention import Attention
from engine.mlx_backend.model.cached_model import CachedModel
from engine.mlx_backend.runner import Launch
from engine.values.request import Constraint, Grammar, GrammarKind, Request, SamplingParams
from engine.values.tokens import pack
from measuring.random_checkpoint import VOCAB_SIZE, tiny_tokenizer
from tests.golden.compiling import compile_at_once
from tests.golden.driving import BLOCK_SIZE, Driver, random_tokens
from tests.grammars import LocalGrammars
from tests.looking_ahead import PendingQuestions, told_ahead
from tests.offline import ChooseDecode, OfflineDaemon, Room, Served

KINDS = ("llama", "gemma3_text", "mamba2", "qwen3_next")
"""Full attention, windows, states alone, states beside attention."""

ROOM = Room(n_blocks=128, max_running=8, step_tokens=32)
END = 1


class LateAnswers(PendingQuestions):
    """What a grammar process would say, each at some later time."""

    def __init__(self, grammars: LocalGrammars, promptness: float, seed: int) -> None:
        super().__init__(VOCAB_SIZE)
        self._grammars = grammars
        self._promptness = promptness
        self._random = Random(seed)

    def wait(self, is_enough: Callable[[], bool], seconds: float) -> None:
        for sequence, matcher in tuple(self.asked.items()):
            if self._random.random() < self._promptness:
                matcher.answer = self._grammars.answer(self.asked.pop(sequence))
        for sequence in tuple(self.drafted):
            if self._random.random() < self._promptness:
                question = self.drafted.pop(sequence)
                question.answers = told_ahead(question, self._grammars.answer)


def requests() -> list[Request]:
    """Four that a grammar holds from the first token on, and two free ones."""
    patterns = ("[a-z]{40,}", "(yes|no| )*", "a+b?c*", "[^a]{3,90}")
    constraints = [Constraint(Grammar(GrammarKind.REGEX, one), "regex") for one in patterns]
    return [
        Request(str(at), pack(range(3 + at, 30)), 24, SamplingParams(seed=at), constraint=held)
        for at, held in enumerate([*constraints, None, None])
    ]


def said(
    served: Served, promptness: float, launch: Launch, decode: ChooseDecode | None = None
) -> tuple[Mapping[tuple[str, int], Sequence[int]], int]:
    """What all say, and how many answers were late."""
    tokenizer = LLTokenizer(tiny_tokenizer().to_str(), n_vocab=VOCAB_SIZE, eos_token=[END])
    answers = LateAnswers(LocalGrammars(tokenizer, frozenset({END})), promptness, seed=0)
    daemon = OfflineDaemon(
        served, Attention(), ROOM, answers=lambda size: answers, launch=launch, decode=decode
    )
    for request in requests():
        verdicts = {request.constraint.grammar: Verdict(None, 0.0)} if request.constraint else {}
        daemon.add(request, grammar_plan(request, verdicts, {END}))
    return daemon.rest(defaultdict(list)), daemon.scheduler.metrics.late_rows


@pytest.mark.parametrize("kind", KINDS)
def test_who_sits_steps_out_says_what_he_says_otherwise(
    kind: str, served_of: Callable[[str], Served], launch: Launch
) -> None:
    served = served_of(kind)
    prompt, none_late = said(served, promptness=1.0, launch=launch)
    late, n_late = said(served, promptness=0.4, launch=launch)
    assert none_late == 0
    assert n_late > 20
    assert late == prompt


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_decodes_next_to_rows_with_grammars(
    kind: str, served_of: Callable[[str], Served], launch: Launch
) -> None:
    """Also next to rows that only resample, and with rows that come back after that."""
    paths = list[DecodePath]()

    def decode(model: CachedModel) -> DecodePath:
        paths.append(compile_at_once(model))
        return paths[-1]

    served = served_of(kind)
    eager, _ = said(served, promptness=1.0, launch=launch)
    prompt, none_late = said(served, promptness=1.0, launch=launch, decode=decode)
    late, n_late = said(served, promptness=0.4, launch=launch, decode=decode)
    assert none_late == 0
    assert n_late > 20
    assert prompt == late == eager
    assert all(path.stats().compiled_steps > 10 for path in paths)


def test_kept_logits_are_computed_before_the_next_step_is_submitted(
    served_of: Callable[[str], Served], launch: Launch
) -> None:
    """Otherwise their copy is launched after the next step's forwards, and the tokens of all rows
    of this step wait for those.
    """
    driver = Driver(served_of("qwen3"), Attention(), launch=launch)
    # So many that MLX copies one row's logits: of few it would keep all.
    subjects = [driver.subject(random_tokens(BLOCK_SIZE, seed)) for seed in range(16)]
    rows = [(subject, BLOCK_SIZE) for subject in subjects]
    late = subjects[0].id
    prefills = [subject.prefill(BLOCK_SIZE, samples=True) for subject in subjects]
    driver.runner.submit(replace(driver.plan(rows), rows=list(prefills)))
    driver.runner.launch()
    driver.runner.draw(StepMasks(late=(late,)))
    mx.synchronize()  # all that has been launched is computed
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    assert [type(row) for row in driver.runner.collect().rows] == [Late, *[Sampled] * 15]
    assert mx.get_peak_memory() <= before, "collecting the step has computed something"
    driver.runner.submit(StepPlan(rows=[Resample(late)]))
    driver.runner.launch()
    driver.runner.draw(NO_STEP_MASKS)
    assert [type(row) for row in driver.runner.collect().rows] == [Sampled]
