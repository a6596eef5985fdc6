"""The output with drafts is the output without, whatever the drafts and the other rows are.

The runner alone, of families without recurrent layers; test_speculation.py has the others.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from mlx.nn.layers.base import Module

from engine.core.step import Decode, Failed, Sampled, SampledToken, StepMasks, Verified, Verify
from engine.grammar.stage import mask_words
from engine.mlx_backend.model.batching import LADDER
from engine.values.request import Dry, SamplingParams, Xtc
from measuring.random_checkpoint import CONFIGS, VOCAB_SIZE
from tests.checkpoints import Family, write_family
from tests.devices import tolerance
from tests.golden.conftest import ATTENTION, EXACT_CASES
from tests.golden.conftest import CASES as SERVED_CASES
from tests.golden.drafting import DraftingDriver, Drafts, Speaker
from tests.golden.driving import BLOCK_SIZE, allowed, compute, random_tokens, reference, rms
from tests.offline import Served, load

DRAFTED = (
    "llama",
    "qwen3",
    "qwen3_moe",
    "gemma3_text",
    "gpt_oss",
    "gemma3n",
    "gemma4_text",
    "deepseek_v3",
    "deepseek_v32",
    "llama4",
    "qwen3_4bit",
    "qwen3_8bit",
    "qwen3_mixed",
    *("qwen3_q8", "gemma3_text_q8", "gpt_oss_k8v4"),
)
"""All families without recurrent layers: a driver of the runner alone cannot go back."""

CASES = [
    *((family, name) for family in DRAFTED for name in ("gather", "paged")),
    *((family, "cascade") for family in DRAFTED if (family, "cascade") in SERVED_CASES),
]

OUTPUT_TOKENS = 36
NEAR = tolerance(1e-3)
TOLERANCE = tolerance(1e-4)
GREEDY = SamplingParams(temperature=0, seed=0, top_logprobs=2)

ASKED = (
    (GREEDY, ()),
    (SamplingParams(seed=1, top_k=20, top_p=0.9, top_logprobs=0), ()),
    (
        SamplingParams(
            seed=2,
            temperature=0.8,
            top_p=0.7,
            repetition_penalty=1.3,
            presence_penalty=0.5,
            frequency_penalty=0.3,
            logit_bias={5: 2.0, 9: -3.0},
        ),
        (),
    ),
    (
        replace(GREEDY, seed=3, frequency_penalty=0.4, min_tokens=12),
        range(0, VOCAB_SIZE, 2),
    ),
    (SamplingParams(seed=4, min_p=0.02, repetition_penalty=1.1), ()),
    (
        SamplingParams(
            seed=5,
            allowed_token_ids=frozenset(range(8)),
            bad_words=((1,), (2, 2), (3, 4), (5, 6, 7), (7, 5, 0)),
        ),
        (),
    ),
    (
        SamplingParams(
            seed=6,
            temperature=0.5,
            xtc=Xtc(0.5, 0.02, (3,)),
            dry=Dry(1.5, allowed_length=1, breakers=((4,), (5, 6))),
        ),
        (),
    ),
)
"""How tokens are chosen, and which ones are ruled out before min_tokens."""

SHARES = ((3, 3), (0, 0), (5, 2), (1, 0), (0, 0), (9, 9), (2, 1), (12, 5), (4, 0))
"""The number of draft tokens and how many of them are right, one draft after another."""


def speakers(driver: DraftingDriver) -> list[Speaker]:
    """Make a speaker for each way of choosing tokens, without masks and with masks."""
    found = []
    for masked in (False, True):
        for at, (params, banned) in enumerate(ASKED):
            prompt = random_tokens(3 + 7 * at + 4 * masked, seed=at)
            found.append(driver.speaker(prompt, params, banned, masked))
    return found


def no_drafts(speaker: Speaker) -> Sequence[int]:
    return ()


def generate(driver: DraftingDriver, drafts: Drafts) -> tuple[list[Speaker], int]:
    """Return what all speakers generate, and in how many steps. They start one after another."""
    all_of_them = speakers(driver)
    for n_turns in count(1):
        going = [
            speaker
            for speaker in all_of_them[: n_turns // 2 + 1]
            if len(speaker.said) < OUTPUT_TOKENS
        ]
        if not going:
            return all_of_them, n_turns
        result = driver.turn(going, drafts)
        assert not any(isinstance(row, Failed) for row in result.rows)
    raise AssertionError


class PartlyRight:
    """Drafts known tokens; the first that is to be wrong is replaced by another token."""

    def __init__(self, known: Sequence[Speaker]) -> None:
        self._known = {speaker.subject.id: speaker.token_ids for speaker in known}
        self._turns = dict.fromkeys(self._known, 0)

    def __call__(self, speaker: Speaker) -> Sequence[int]:
        name, n_said = speaker.subject.id, len(speaker.said)
        at = self._turns[name] = self._turns[name] + 1
        n_drafts, n_right = SHARES[(at + name) % len(SHARES)]
        drafts = self._known[name][n_said : n_said + n_drafts]
        if n_right < len(drafts):
            drafts[n_right] = (drafts[n_right] + 1) % VOCAB_SIZE
        return drafts


def expect_alike(found: Sequence[Speaker], expected: Sequence[Speaker]) -> None:
    for speaker, other in zip(found, expected, strict=True):
        assert speaker.token_ids[:OUTPUT_TOKENS] == other.token_ids[:OUTPUT_TOKENS]
        ours, theirs = _logprobs(speaker.said), _logprobs(other.said)
        np.testing.assert_allclose(ours, theirs, atol=NEAR)


def _logprobs(said: Sequence[SampledToken]) -> list[float]:
    of_tokens = [token.logprob for token in said[:OUTPUT_TOKENS]]
    return [
        logprob
        for one in of_tokens
        if one is not None
        for logprob in (one.logprob, *(value for _, value in one.top))
    ]


@pytest.mark.parametrize(("family", "attention"), [case for case in CASES if case in EXACT_CASES])
def test_what_is_said_with_drafts_is_what_is_said_without(
    served_of: Callable[[str], Served], family: str, attention: str
) -> None:
    served = served_of(family)
    plain, n_plain = generate(DraftingDriver(served, ATTENTION[attention]()), no_drafts)
    drafts = PartlyRight(plain)
    drafted, n_drafted = generate(DraftingDriver(served, ATTENTION[attention]()), drafts)
    expect_alike(drafted, plain)
    assert n_drafted < n_plain


@pytest.mark.parametrize("rung", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_on_each_rung_of_the_ladder(
    served_of: Callable[[str], Served], family: str, rung: int
) -> None:
    served = served_of(family)
    plain, _ = generate(DraftingDriver(served, ATTENTION["gather"]()), no_drafts)
    lower = replace(served, execution=replace(served.execution, batching=LADDER[rung]))
    drafted, _ = generate(DraftingDriver(lower, ATTENTION["gather"]()), PartlyRight(plain))
    expect_alike(drafted, plain)


def test_with_masks_by_kv_head(tmp_path: Path) -> None:
    served = load(write_family(Family("gemma2", CONFIGS["gemma2"]), tmp_path))
    assert served.execution.batching is LADDER[2]
    plain, _ = generate(DraftingDriver(served, ATTENTION["gather"]()), no_drafts)
    drafted, _ = generate(DraftingDriver(served, ATTENTION["gather"]()), PartlyRight(plain))
    expect_alike(drafted, plain)


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_what_rejected_drafts_have_written_is_never_seen(
    served_of: Callable[[str], Served],
    peer_of: Callable[[str], Module],
    family: str,
    attention: str,
) -> None:
    """Decodes after them overwrite their KV, token by token and across blocks."""
    driver = DraftingDriver(served_of(family), ATTENTION[attention]())
    prompt = random_tokens(2 * BLOCK_SIZE - 3, seed=1)
    speaker = driver.speaker(prompt, GREEDY)
    wrong = random_tokens(2 * BLOCK_SIZE, seed=2)
    for drafts in (no_drafts, lambda _: wrong, no_drafts, lambda _: wrong[:3]):
        while len(prompt) >= len(speaker.subject.tokens):
            driver.turn([speaker], no_drafts)
        before = len(speaker.said)
        driver.turn([speaker], drafts)
        assert len(speaker.said) <= before + 2, "nearly all are wrong"
        found = []
        for _ in range(BLOCK_SIZE + 2):
            driver.turn([speaker], no_drafts)
            found.append(driver.reader.seen[GREEDY.seed])
        peer = peer_of(family)
        expected = reference(peer, speaker.subject.tokens)[-1 - len(found) : -1]
        assert rms(np.stack(found), expected) < allowed(TOLERANCE, peer)


def next_of(known: Speaker, n_drafts: int) -> Drafts:
    """The right ones."""
    return lambda speaker: known.token_ids[len(speaker.said) :][:n_drafts]


def plain_and_drafted(served: Served) -> tuple[Speaker, DraftingDriver, Speaker]:
    """Return a masked speaker's output without drafts, and a driver with the same speaker anew."""
    params, prompt = SamplingParams(seed=1, top_logprobs=1), random_tokens(5, seed=1)
    drivers = [DraftingDriver(served, ATTENTION["gather"]()) for _ in range(2)]
    plain, drafted = (driver.speaker(prompt, params, masked=True) for driver in drivers)
    for _ in range(OUTPUT_TOKENS):
        drivers[0].turn([plain], no_drafts)
    return plain, drivers[1], drafted


def test_a_row_has_as_many_draws_as_masks(served_of: Callable[[str], Served]) -> None:
    plain, driver, drafted = plain_and_drafted(served_of("qwen3"))
    driver.turn([drafted], no_drafts)
    drafted.most_masks = 3
    for n_said in range(4, OUTPUT_TOKENS, 4):
        driver.turn([drafted], next_of(plain, 6))
        assert len(drafted.said) == n_said
        driver.turn([drafted], no_drafts)
    driver.turn([drafted], next_of(plain, 6))
    expect_alike([drafted], [plain])


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_late_rows_draw_none_of_their_drafts(
    served_of: Callable[[str], Served], family: str
) -> None:
    plain, driver, drafted = plain_and_drafted(served_of(family))
    driver.turn([drafted], no_drafts)
    for n_said in range(2, OUTPUT_TOKENS, 6):
        driver.late_turn(drafted, next_of(plain, 4))
        assert len(drafted.said) == n_said
        driver.turn([drafted], no_drafts)
        driver.turn([drafted], next_of(plain, 3))
    expect_alike([drafted], [plain])


@pytest.mark.parametrize(("is_right", "fails"), [(True, True), (False, False)])
def test_a_draw_that_is_none_fails_its_row_only_where_it_counts(
    served_of: Callable[[str], Served], is_right: bool, fails: bool
) -> None:
    """The mask of the second draw allows nothing."""
    driver = DraftingDriver(served_of("qwen3"), ATTENTION["gather"]())
    prompt = random_tokens(6, seed=1)
    speaker, other = driver.speaker(prompt, GREEDY), driver.speaker(prompt, GREEDY)
    driver.turn([speaker, other], no_drafts)
    driver.turn([other], no_drafts)
    draft = (other.token_ids[1] + (not is_right)) % VOCAB_SIZE
    name, last = speaker.subject.id, speaker.subject.prefill(1, samples=True)
    verify = Verify(name, last.start, last.tokens[0], (draft,))
    plan = replace(
        driver.plan([(speaker.subject, 2), (other.subject, 1)]),
        rows=[verify, Decode(other.subject.id)],
    )
    masks = np.zeros((2, mask_words(VOCAB_SIZE)), dtype=np.int32)
    masks[0] = -1
    result = compute(driver.runner, plan, StepMasks((name, name), masks))
    assert [type(row) for row in result.rows] == [Failed if fails else Verified, Sampled]
