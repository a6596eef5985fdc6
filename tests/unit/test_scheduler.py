"""What the scheduler promises, one promise a test. The simulation covers their mixtures."""

import random
from copy import copy
from unittest.mock import Mock

import pytest

from engine.api import InvalidRequest, QueueFull
from engine.core.budget import StepShape
from engine.core.step import Late, Prefill, Resample, SequenceId
from engine.values.output import FinishReason
from engine.values.request import Pooling, Request, SamplingParams
from engine.values.tokens import pack
from kvstore.recurrent import RecurrentGroup
from kvstore.tokens import Tokens
from kvstore.types import DEFAULT_NAMESPACE
from kvstore.window import WindowGroup
from tests.profiles import examples
from tests.simulation.fake_runner import InjectedError
from tests.unit.engine_harness import VOCAB_SIZE, Harness, n_tokens, prompt, row_tokens
from tests.unit.kv_helpers import tree_of


def raise_injected() -> None:
    raise InjectedError("injected")


def test_sixteen_cold_duplicates_prefill_their_system_prompt_once() -> None:
    harness = Harness(n_blocks=200, step_tokens=16)
    system = prompt(1, 40)
    duplicates = [harness.add([*system, i, i + 1, i + 2]) for i in range(16)]
    harness.finish()
    cached = sum(harness.usage(duplicate).cached_tokens for duplicate in duplicates)
    assert cached == 15 * 40
    prompt_tokens = 16 * 43
    assert harness.scheduler.metrics.computed_prompt_tokens == prompt_tokens - cached


def test_a_long_prompt_never_keeps_a_decode_from_its_step() -> None:
    harness = Harness(step_tokens=16)
    decode = harness.add(prompt(1, 4), max_tokens=30)
    harness.step()
    harness.add(prompt(2, 100))
    for _ in range(7):
        before = len(harness.output(decode))
        harness.step()
        assert len(harness.output(decode)) == before + 1
    chunks = [n_tokens(plan.rows[-1]) for plan in harness.plans[1:]]
    assert chunks == [15] * 6 + [10]


def test_a_step_never_exceeds_its_token_budget() -> None:
    harness = Harness(n_blocks=200, step_tokens=16, max_running=16)
    for i in range(20):
        harness.add(prompt(i, 5 + i))
    harness.finish()
    assert max(sum(row_tokens(plan).values()) for plan in harness.plans) <= 16


def order_of_ends(harness: Harness) -> list[str]:
    harness.finish()
    return [request for request in harness.events if harness.end(request)]


def test_of_a_client_s_own_lower_priority_numbers_go_first_then_the_earlier() -> None:
    harness = Harness(max_running=1)
    late, early, urgent = (
        harness.add(prompt(1, 5)),
        harness.add(prompt(2, 5)),
        harness.add(prompt(3, 5), priority=-1),
    )
    assert order_of_ends(harness) == [urgent, late, early]


def test_clients_take_turns() -> None:
    harness = Harness(max_running=1)
    flood = [harness.add(prompt(i, 5), client="flood") for i in range(20)]
    short = [harness.add(prompt(30 + i, 5), client="short") for i in range(2)]
    other = harness.add(prompt(40, 5), client="other")
    first_rounds = [flood[0], short[0], other, flood[1], short[1], *flood[2:]]
    assert order_of_ends(harness) == first_rounds


def test_no_priority_goes_before_another_client_s_turn() -> None:
    harness = Harness(max_running=1)
    urgent = [harness.add(prompt(i, 5), client="urgent", priority=-1000) for i in range(3)]
    patient = harness.add(prompt(9, 5), client="patient", priority=1000)
    assert order_of_ends(harness) == [urgent[0], patient, *urgent[1:]]


def test_each_of_n_outputs_is_a_turn() -> None:
    harness = Harness(max_running=1)
    many = harness.add(prompt(1, 5), client="many", n=4)
    one = harness.add(prompt(2, 5), client="one")
    for _ in range(1000):
        if one in harness.events:
            break
        harness.step()
    assert len({event.index for event in harness.events[many]}) == 1


def test_a_client_that_waits_for_a_duplicate_keeps_its_turn() -> None:
    harness = Harness(max_running=2, step_tokens=16)
    leader = harness.add(prompt(1, 60), client="a")
    harness.step()
    duplicate = harness.add(prompt(1, 60), client="b")
    others = [harness.add(prompt(2 + i, 5), client="c") for i in range(9)]
    harness.finish()
    starts = [int(id) for id in harness.runner.computed_tokens]
    assert starts.index(1) < starts.index(4), "ids are in the order of arrival: 1 is the duplicate"
    assert harness.usage(duplicate).cached_tokens == 59
    assert {len(harness.output(request)) for request in (leader, duplicate, *others)} == {4}


def test_a_preempted_sequence_has_had_its_turn() -> None:
    harness = Harness(n_blocks=9, block_size=4)
    first = harness.add(prompt(2, 11), max_tokens=12, client="a")
    preempted = harness.add(prompt(1, 11), max_tokens=12, client="a")
    while harness.scheduler.metrics.preemptions == 0:
        harness.step()
    newcomers = [harness.add(prompt(3 + i, 30), max_tokens=2, client=f"{i}") for i in range(3)]
    assert [s.request.id for s in harness.scheduler.waiting] == [preempted, *newcomers]
    assert order_of_ends(harness) == [first, preempted, *newcomers]


def test_a_long_prompt_is_not_overtaken_by_those_that_would_fit() -> None:
    harness = Harness(n_blocks=12, block_size=4, max_running=3)
    running = [harness.add(prompt(i, 8), max_tokens=2 + i, client="a") for i in range(3)]
    harness.step()
    long = harness.add(prompt(5, 40), max_tokens=2, client="long")
    short = [harness.add(prompt(6 + i, 4), max_tokens=2, client="a") for i in range(4)]
    assert order_of_ends(harness) == [*running, long, *short]


def test_preempted_sequences_say_what_they_would_have_said() -> None:
    prompts = [prompt(i, 10) for i in range(4)]
    roomy, tight = Harness(n_blocks=64), Harness(n_blocks=12)
    outputs = []
    for harness in (roomy, tight):
        requests = [harness.add(p, max_tokens=16) for p in prompts]
        harness.finish()
        outputs.append([harness.output(request) for request in requests])
    assert roomy.scheduler.metrics.preemptions == 0
    assert tight.scheduler.metrics.preemptions > 0
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("seed", range(examples(20)))
def test_only_tokens_of_prompts_count_as_computed_prompt(seed: int) -> None:
    """A preempted sequence computes its output again, in one row with the rest of its prompt."""
    drawing = random.Random(seed)
    harness = Harness(n_blocks=8, block_size=4)
    lengths = dict[SequenceId, int]()
    for index in range(3):
        length = drawing.randrange(6, 11)
        name = harness.add(prompt(index, length), max_tokens=drawing.randrange(10, 16))
        lengths[harness.sequence(name).id] = length
    harness.finish()
    positions = [
        position < lengths[row.sequence_id]
        for plan in harness.plans
        for row in plan.rows
        if isinstance(row, Prefill)
        for position in range(row.start, row.start + len(row.tokens))
    ]
    assert harness.scheduler.metrics.preemptions > 0
    assert not all(positions)
    assert harness.scheduler.metrics.computed_prompt_tokens == sum(positions)


def test_the_lowest_priority_gives_way() -> None:
    harness = Harness(n_blocks=9, block_size=4)
    low = harness.add(prompt(1, 11), max_tokens=12, priority=5)
    high = harness.add(prompt(2, 11), max_tokens=12)
    while harness.scheduler.metrics.preemptions == 0:
        harness.step()
    assert harness.sequence(low) in list(harness.scheduler.waiting)
    assert harness.sequence(high) in harness.scheduler.running
    harness.finish()
    assert len(harness.output(low)) == len(harness.output(high)) == 12


def test_a_sequence_with_nobody_below_it_gives_way_itself() -> None:
    harness = Harness(n_blocks=9, block_size=4)
    high = harness.add(prompt(2, 11), max_tokens=12)
    low = harness.add(prompt(1, 12), max_tokens=12, priority=5)
    while harness.scheduler.metrics.preemptions == 0:
        plan = harness.step()
    assert [row.sequence_id for row in plan.rows] == [harness.sequence(high).id]
    harness.finish()
    assert len(harness.output(low)) == 12


def test_n_outputs_share_one_prompt_and_copy_only_its_tail() -> None:
    harness = Harness(block_size=8)
    request = harness.add(prompt(1, 21), max_tokens=5, n=4)
    harness.finish()
    assert [harness.usage(request, i).cached_tokens for i in range(4)] == [0] * 4
    assert harness.scheduler.metrics.computed_prompt_tokens == 21 + 3
    assert len({tuple(harness.output(request, i)) for i in range(4)}) == 4
    alone = Harness(block_size=8)
    for index in range(4):
        single = alone.serve(prompt(1, 21), 5, sampling=SamplingParams(seed=3 + index))
        assert alone.output(single) == harness.output(request, index)


def test_siblings_go_on_when_the_first_is_gone() -> None:
    harness = Harness()
    request = harness.add(prompt(1, 10), max_tokens=0, n=2)
    harness.finish()
    assert [harness.reason(request, i) for i in range(2)] == [FinishReason.LENGTH] * 2


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_abort_gives_everything_back_in_every_state(steps: int) -> None:
    harness = Harness(step_tokens=16)
    request = harness.add(prompt(1, 40), n=2)
    for _ in range(steps):
        harness.step()
    harness.scheduler.abort(request)
    harness.take(harness.scheduler.take_events())
    assert [harness.reason(request, i) for i in range(2)] == [FinishReason.ABORT] * 2
    assert not harness.scheduler.has_work
    assert harness.pool.n_referenced == 0
    harness.scheduler.abort(request)
    assert harness.scheduler.take_events() == []


def test_what_an_aborted_request_has_computed_stays_in_the_cache() -> None:
    harness = Harness(step_tokens=16)
    aborted = harness.add(prompt(1, 40))
    harness.step()
    harness.scheduler.abort(aborted)
    harness.take(harness.scheduler.take_events())
    assert harness.usage(harness.serve(prompt(1, 40))).cached_tokens == 16


def test_a_step_that_raises_fails_its_requests_publishes_nothing_and_spares_the_rest() -> None:
    harness = Harness(max_running=1)
    doomed, spared = harness.add(prompt(1, 10)), harness.add(prompt(2, 10))
    harness.fault = raise_injected
    harness.step()
    harness.fault = lambda: None
    harness.finish()
    assert harness.end(doomed).error == "injected"
    assert harness.reason(doomed) is FinishReason.ERROR
    assert harness.reason(spared) is FinishReason.LENGTH
    assert harness.usage(harness.serve(prompt(1, 10))).cached_tokens == 0


def test_a_scored_prompt_is_waited_for_and_waits_for_nobody() -> None:
    harness = Harness(step_tokens=16)
    scored = harness.add(prompt(1, 60), prompt_logprobs=0)
    duplicate = harness.add(prompt(1, 60))
    harness.finish()
    assert harness.usage(scored).cached_tokens == 0
    assert harness.usage(duplicate).cached_tokens == 59


def test_what_rows_compute_besides_tokens_has_a_cost() -> None:
    """Log-probabilities of each of the two sequences, and of the prompts' last tokens; pooling."""
    harness, shapes = Harness(), list[StepShape]()
    listed = SamplingParams(top_logprobs=2)
    harness.add(prompt(1, 20), sampling=listed, n=2)
    harness.add(prompt(2, 20), max_tokens=0, pooling=Pooling.LAST)
    harness.add(prompt(3, 20))
    while (step := harness.scheduler.plan()) is not None:
        shapes.append(step.budget.shape)
        harness.compute(step)
    assert sum(shape.pooled_chunks for shape in shapes) == 1
    assert max(shape.listed_rows for shape in shapes) == 2
    assert max(shape.decode_rows for shape in shapes) == 3


def test_a_cached_prompt_does_not_wait_for_one_that_is_scored() -> None:
    window = WindowGroup(0, window=8, n_slots=100, block_size=4, step_tokens=8)
    harness = Harness(step_tokens=16, groups=[window])
    harness.serve(prompt(1, 60))
    scored = harness.add(prompt(1, 60), prompt_logprobs=0)
    harness.step()
    duplicate = harness.add(prompt(1, 60))
    harness.step()
    assert len(harness.output(duplicate)) == 1
    harness.finish()
    assert harness.usage(duplicate).cached_tokens == 59
    assert harness.usage(scored).cached_tokens == 0


def test_two_long_prompts_share_the_budget_in_order_of_arrival() -> None:
    harness = Harness(step_tokens=16)
    first, second = harness.add(prompt(1, 24)), harness.add(prompt(2, 24))
    plans = [harness.step() for _ in range(3)]
    first_id, second_id = 0, 1
    lengths = [row_tokens(plan) for plan in plans]
    assert lengths == [{first_id: 16}, {first_id: 8, second_id: 8}, {first_id: 1, second_id: 15}]
    harness.finish()
    assert len(harness.output(first)) == len(harness.output(second))


def test_scoring_computes_every_token_even_of_a_cached_prompt() -> None:
    harness = Harness(step_tokens=16)
    harness.serve(prompt(1, 30))
    scored = harness.serve(prompt(1, 30), 2, prompt_logprobs=1)
    logprobs = [entry for e in harness.events[scored] for entry in e.prompt_logprobs]
    assert harness.usage(scored).cached_tokens == 0
    assert logprobs[0] is None
    assert [entry.token_id for entry in logprobs[1:] if entry] == prompt(1, 30)[1:]


def test_a_prompt_can_be_scored_without_generating() -> None:
    harness = Harness(step_tokens=16)
    request = harness.serve(prompt(1, 30), 0, prompt_logprobs=0)
    assert harness.reason(request) is FinishReason.LENGTH
    assert harness.output(request) == []
    events = harness.events[request]
    assert sum(len(event.prompt_logprobs) for event in events) == 30
    assert max(len(event.prompt_logprobs) for event in events) <= 17, "a part for each chunk"


def test_scores_that_have_been_sent_are_not_computed_again() -> None:
    harness = Harness(n_blocks=9, block_size=4, step_tokens=16)
    scored = harness.add(prompt(1, 12), max_tokens=12, prompt_logprobs=1, priority=3)
    harness.step()
    assert harness.output(scored)
    harness.add(prompt(2, 12), max_tokens=12)
    harness.finish()
    assert harness.scheduler.metrics.preemptions > 0
    prefills = [row for plan in harness.plans for row in plan.rows if isinstance(row, Prefill)]
    assert sum(row.score is not None for row in prefills) == 1


def test_a_refused_prompt_is_matched_again_only_when_somebody_has_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness(n_blocks=16, block_size=4)
    running = harness.add(prompt(1, 24), max_tokens=12)
    harness.step()
    refused = harness.add(prompt(2, 40), max_tokens=2)
    match = Mock(wraps=tree_of(harness.store).match)
    monkeypatch.setattr(tree_of(harness.store), "match", match)
    for _ in range(10):
        harness.step()
    assert len(harness.scheduler.waiting) == 1
    assert match.call_count == 1
    harness.finish()
    assert [len(harness.output(request)) for request in (running, refused)] == [12, 2]


def test_a_state_is_saved_where_a_queued_prompt_will_resume() -> None:
    """Also when the first chunk of the prompt that is computed first would run past that point."""
    groups = [RecurrentGroup(16, 16, 4, 1000)]
    harness = Harness(step_tokens=64, groups=groups)
    harness.add(prompt(1, 40), max_tokens=2)
    queued = harness.add([*prompt(1, 22), *prompt(2, 8)], max_tokens=2)
    harness.finish()
    assert harness.usage(queued).cached_tokens == 20


def test_a_sibling_waits_rather_than_take_the_last_block() -> None:
    harness = Harness(n_blocks=13, block_size=4)
    other = harness.add(prompt(1, 8), max_tokens=8)
    harness.step()
    forked = harness.add(prompt(2, 30), max_tokens=4, n=2)
    harness.finish()
    assert harness.scheduler.metrics.preemptions == 0
    assert len(harness.output(other)) == 8
    assert [len(harness.output(forked, index)) for index in range(2)] == [4, 4]


def test_prefix_tokens_are_counted_once_for_each_prompt() -> None:
    harness = Harness(n_blocks=12, block_size=4, step_tokens=16)
    for start in (1, 2):
        harness.add(prompt(start, 17), max_tokens=12)
    harness.finish()
    counters = harness.scheduler.metrics
    assert harness.scheduler.metrics.preemptions > 0
    assert (counters.queried_prompt_tokens, counters.cached_prompt_tokens) == (34, 0)
    harness.serve(prompt(3, 17), n=2)
    assert (counters.queried_prompt_tokens, counters.cached_prompt_tokens) == (51, 0)


def test_generation_ends_at_an_eos_token_or_a_stop_string() -> None:
    free = Harness()
    output = free.output(free.serve(prompt(1, 5), max_tokens=8))
    eos = Harness(eos_token_ids=frozenset({output[3]}))
    request = eos.serve(prompt(1, 5), max_tokens=8)
    assert eos.output(request) == output[:4]
    assert eos.text(request) == free.text(next(iter(free.events)))[:3]
    assert eos.reason(request) is FinishReason.STOP
    stop = free.text(next(iter(free.events)))[4:6]
    stopped = Harness()
    request = stopped.serve(prompt(1, 5), 8, stop=(stop,))
    assert stopped.text(request) == free.text(next(iter(free.events)))[:4]


def test_no_eos_before_min_tokens() -> None:
    free = Harness()
    output = free.output(free.serve(prompt(1, 5), max_tokens=8))
    eos = Harness(eos_token_ids=frozenset({output[0]}))
    assert eos.output(eos.serve(prompt(1, 5), 8)) == output[:1]
    sampling = SamplingParams(seed=3, min_tokens=3)
    request = eos.serve(prompt(1, 5), 8, sampling=sampling)
    assert len(eos.output(request)) > 3
    assert output[0] not in eos.output(request)[:3]


def test_no_stop_string_before_min_tokens() -> None:
    free = Harness()
    text = free.text(free.serve(prompt(1, 5), max_tokens=8))
    harness = Harness()
    sampling = SamplingParams(seed=3, min_tokens=4)
    request = harness.serve(prompt(1, 5), 8, sampling=sampling, stop=(text[1], text[5]))
    assert harness.text(request) == text[: text.index(text[5], 3)]
    assert harness.reason(request) is FinishReason.STOP


def test_penalties_are_given_the_tokens_they_punish() -> None:
    harness = Harness()
    sampling = SamplingParams(seed=3, repetition_penalty=1.2)
    harness.serve(prompt(1, 5), 3, sampling=sampling)
    (entry,) = [entry for plan in harness.plans for entry in plan.enter]
    assert list(entry.sampling.prompt_tokens) == prompt(1, 5)
    assert entry.sampling.output_tokens == ()


def test_a_preempted_sequence_with_bad_words_comes_back_with_its_output() -> None:
    harness = Harness(n_blocks=9, block_size=4)
    sampling = SamplingParams(seed=3, bad_words=((1, 2),))
    low = harness.add(prompt(1, 11), max_tokens=12, priority=5, sampling=sampling)
    harness.add(prompt(2, 11), max_tokens=12)
    harness.finish()
    entries = [entry.sampling for plan in harness.plans for entry in plan.enter]
    first, *again = [entry for entry in entries if entry.params.bad_words]
    assert first.output_tokens == ()
    assert again
    for entry in again:
        assert list(entry.output_tokens) == harness.output(low)[: entry.output_index] != []


def test_a_full_queue_refuses_and_says_when_there_is_room() -> None:
    now = 0.0
    harness = Harness(max_waiting=4, clock=lambda: now)
    harness.add(prompt(1, 4), n=3)
    now = 7.0  # one sequence must leave, and none has left in this time
    with pytest.raises(QueueFull) as refusal:
        harness.add(prompt(2, 4), n=2, client="other")
    assert refusal.value.retry_after_seconds == 7
    assert "3 sequences wait, 0 of them this client's, and 4 may" in str(refusal.value)
    harness.add(prompt(2, 4), client="other")
    harness.finish()


def test_no_client_fills_the_queue_alone() -> None:
    harness = Harness(max_waiting=64)
    for i in range(32):
        harness.add(prompt(i, 4), client="flood")
    with pytest.raises(QueueFull, match="32 of them this client's"):
        harness.add(prompt(40, 4), client="flood")
    for i in range(16):
        harness.add(prompt(i, 4), client="other")
    harness.finish()


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (Request("a", pack(()), 4), "prompt"),
        (Request("a", pack((1, VOCAB_SIZE)), 4), "prompt"),
        (Request("a", pack((1,) * 201), 4), "prompt"),
        (Request("a", pack((1,)), 300), "max_tokens"),
        (Request("a", pack((1,)), -1), "max_tokens"),
        (Request("a", pack((1,)), 4, n=0), "n"),
        (Request("a", pack((1,)), 4, n=65), "n"),
        (Request("a", pack((1,)), 4, SamplingParams(min_tokens=5)), "min_tokens"),
        (Request("a", pack((1,)), 4, SamplingParams(top_k=-1)), "top_k"),
        (Request("a", pack((1,)), 4, prediction=pack((1, VOCAB_SIZE))), "prediction"),
        (Request("a", pack((1,)), 4, prediction=pack((1,) * 201)), "prediction"),
        (Request("a", pack((1,)), 4, SamplingParams(logit_bias={VOCAB_SIZE: 1.0})), "logit_bias"),
        (
            Request("a", pack((1,)), 4, SamplingParams(allowed_token_ids=frozenset({VOCAB_SIZE}))),
            "allowed_token_ids",
        ),
        (
            Request("a", pack((1,)), 4, SamplingParams(allowed_token_ids=frozenset())),
            "allowed_token_ids",
        ),
        (Request("a", pack((1,)), 4, SamplingParams(bad_words=((1, -1),))), "bad_words"),
        (Request("a", pack((1,)), 4, SamplingParams(bad_words=((),))), "bad_words"),
        (
            Request("a", pack((1,)), 4, SamplingParams(top_logprobs=0, logprob_token_ids=(-1,))),
            "logprob_token_ids",
        ),
        (Request("a", pack((1,)), 4, SamplingParams(logprob_token_ids=(1,))), "logprob_token_ids"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(request_: Request, param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Harness().scheduler.prepare(request_)
    assert refusal.value.param == param


def test_an_id_in_use_is_refused() -> None:
    harness = Harness()
    submission = harness.scheduler.prepare(Request("a", pack((1,)), 4))
    harness.scheduler.add(submission)
    with pytest.raises(InvalidRequest, match="id a"):
        harness.scheduler.add(submission)


def test_a_prompt_that_fills_the_arena_is_served_and_one_token_more_is_not() -> None:
    harness = Harness(n_blocks=5, block_size=4)
    for _ in range(2):
        assert harness.reason(harness.serve(prompt(1, 14), 6)) is FinishReason.LENGTH
    with pytest.raises(InvalidRequest, match="KV cache"):
        harness.add(prompt(1, 14), 7)


def test_a_step_budget_below_the_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="step_tokens"):
        Harness(step_tokens=4, max_running=8)


def test_the_last_token_of_a_prompt_waits_for_no_other_client() -> None:
    harness = Harness(n_blocks=512, step_tokens=32)
    first = harness.add(prompt(1, 33))
    for number in range(4):
        harness.add(prompt(2 + number, 150), client=f"client-{number}")
    harness.step()
    harness.step()
    assert len(harness.output(first)) == 1


def test_a_step_that_only_draws_teaches_nothing_of_costs() -> None:
    harness = Harness()
    request_id = harness.add(prompt(1, 10), max_tokens=20)
    harness.step()
    before = copy(vars(harness.scheduler.costs))
    harness.sequence(request_id).pending = Late()
    step = harness.scheduler.plan()
    assert step is not None
    assert [type(row) for row in step.plan.rows] == [Resample]
    harness.scheduler.observe(step, (), 5.0)
    assert vars(harness.scheduler.costs) == before


@pytest.mark.parametrize(("max_running", "step_tokens"), [(8, 16), (1, 16), (8, 8)])
def test_a_prompt_that_arrives_during_a_prefill_resumes_where_they_differ(
    max_running: int, step_tokens: int
) -> None:
    """The state is saved there, though the queue is not looked at before the prefill is beyond."""
    harness = Harness(
        n_blocks=128,
        step_tokens=step_tokens,
        max_running=max_running,
        groups=[RecurrentGroup(max_running, 16, 4, 64)],
    )
    leader = prompt(1, 100)
    harness.add(leader, 2)
    harness.step()
    other = harness.add(leader[:42] + prompt(5, 30), 2)
    harness.finish()
    assert harness.usage(other).cached_tokens == 40


def test_later_outputs_cache_no_more_than_is_shared() -> None:
    harness = Harness(n_blocks=128)
    tokens = prompt(1, 40)
    request_id = harness.add(tokens, 30, n=2, shared_tokens=8)
    harness.finish()
    answer = Tokens([*tokens, *harness.output(request_id, 1), 0])
    assert harness.store.probe(DEFAULT_NAMESPACE, answer) == 8


def test_a_request_that_asks_for_it_is_told_of_each_chunk_of_its_prompt() -> None:
    harness = Harness(step_tokens=8, max_running=8)
    silent = harness.add([1] * 30)
    asking = harness.add([2] * 30, n=2, reports_progress=True)
    harness.finish()
    assert [event.read_tokens for event in harness.events[silent] if event.read_tokens] == []
    told = [event for event in harness.events[asking] if event.read_tokens is not None]
    read = [event.read_tokens or 0 for event in told if event.index == 0]
    assert len(read) > 2
    assert read == sorted(set(read))
    assert read[-1] == 30
    first_token = min(i for i, event in enumerate(harness.events[asking]) if event.token_ids)
    assert harness.events[asking].index(told[-1]) < first_token or told[-1].index == 1
