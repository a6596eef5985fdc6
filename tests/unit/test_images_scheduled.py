"""When images are encoded, what is kept of them, and what requests with images share."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from random import Random

import pytest
from blake3 import blake3

from engine.api import InvalidRequest
from engine.core.images import whole_images_problem
from engine.core.request import cache_tokens
from engine.core.rows import batch_entry
from engine.core.sequence import Step
from engine.core.step import Prefill, Prefilled, StepLost, StepResult, StorageLost
from engine.drafts.sources import Draft
from engine.values.images import Image, ImageInput
from engine.values.output import FinishReason
from engine.values.request import Request, SamplingParams
from engine.values.stats import DraftSource
from engine.values.tokens import pack
from kvstore.recurrent import RecurrentGroup
from kvstore.window import WindowGroup, lease_slots
from tests.simulation.expected import expected
from tests.unit.engine_harness import VOCAB_SIZE, Harness

PART = VOCAB_SIZE - 1
TAKES = ImageInput(PART, max_tokens=24, n_stages=6, bytes_per_token=1, feature_bytes=24)
ROOMY = replace(TAKES, feature_bytes=1000)

Prompt = tuple[list[int], tuple[Image, ...]]


def prompt_of(*parts: int | tuple[str, int], is_whole: bool = False) -> Prompt:
    """A prompt of numbers of tokens of text, and of names of images with their numbers of tokens.
    The text of one part is the same in each prompt that has it at the same place.
    """
    ids, images = list[int](), list[Image]()
    for part in parts:
        if isinstance(part, int):
            ids += [(len(ids) + n) % 40 for n in range(part)]
        else:
            name, n_tokens = part
            runs = ((len(ids), n_tokens),)
            digest = blake3(name.encode()).digest()
            images.append(Image(digest, runs, (n_tokens,), name, is_whole))
            ids += [PART] * n_tokens
    return ids, tuple(images)


def serve(engine: Harness, prompt: Prompt, max_tokens: int = 4, **options: object) -> str:
    ids, images = prompt
    return engine.serve(ids, max_tokens, images=images, **options)


def add(engine: Harness, prompt: Prompt, max_tokens: int = 4, **options: object) -> str:
    ids, images = prompt
    return engine.add(ids, max_tokens, images=images, **options)  # type: ignore[arg-type]


def chunks(engine: Harness) -> list[tuple[int, int]]:
    """The first position and the end of each chunk of the steps so far."""
    rows = [row for plan in engine.plans for row in plan.rows if isinstance(row, Prefill)]
    return [(row.start, row.start + len(row.tokens)) for row in rows]


def evict_to(engine: Harness, prompt: Prompt, n_tokens: int) -> None:
    """Evict blocks until at most `n_tokens` tokens of the prompt are in the cache."""
    tree = engine.store.tree
    assert tree is not None
    [namespace] = tree.roots
    tokens = cache_tokens(pack(prompt[0]), prompt[1])
    while tree.match(namespace, tokens.packed(0, len(tokens))).n_tokens > n_tokens:
        tree.evict()


def n_encoded(engine: Harness) -> int:
    return engine.runner.tower.encoded.total()


def told(prompt: Prompt, max_tokens: int, seed: int = 3) -> list[int]:
    """What the model says when it is alone."""
    ids, images = prompt
    request = Request("r", pack(ids), max_tokens, SamplingParams(seed=seed), images=images)
    return expected(request, seed, VOCAB_SIZE, frozenset()).token_ids


class TestSharing:
    def test_an_image_in_a_shared_prefix_is_computed_once(self) -> None:
        engine = Harness(images=ROOMY)
        serve(engine, prompt_of(5, ("cat", 9), 6))
        again = serve(engine, prompt_of(5, ("cat", 9), 6))
        assert engine.usage(again).cached_tokens == 19
        longer = serve(engine, prompt_of(5, ("cat", 9), 6, ("dog", 4), 3))
        assert engine.usage(longer).cached_tokens == 20
        assert n_encoded(engine) == 2

    def test_images_of_one_size_share_no_token(self) -> None:
        engine = Harness(images=ROOMY)
        serve(engine, prompt_of(6, ("cat", 9), 6))
        other = serve(engine, prompt_of(6, ("dog", 9), 6))
        assert engine.usage(other).cached_tokens == 6
        assert engine.output(other) == told(prompt_of(6, ("dog", 9), 6), 4)

    def test_a_turn_after_an_image_encodes_nothing_though_its_features_are_gone(self) -> None:
        engine = Harness(images=TAKES)
        first = prompt_of(5, ("cat", 20), 6)
        answer = engine.output(serve(engine, first))
        serve(engine, prompt_of(3, ("dog", 20), 6))
        before = n_encoded(engine)
        ids, images = first
        turn = [*ids, *answer, 1, 2, 3], images
        request = serve(engine, turn)
        assert engine.usage(request).cached_tokens >= len(ids) + len(answer) - 1
        assert n_encoded(engine) == before == 2

    def test_a_match_that_ends_within_an_image_encodes_it_again(self) -> None:
        engine = Harness(images=TAKES)
        prompt = prompt_of(6, ("cat", 20), 5)
        serve(engine, prompt, 1)
        serve(engine, prompt_of(2, ("dog", 10), 3), 1)
        evict_to(engine, prompt, 16)
        again = serve(engine, prompt, 2)
        assert engine.usage(again).cached_tokens == 16
        assert n_encoded(engine) == 3
        assert engine.output(again) == told(prompt, 2)

    def test_outputs_of_one_prompt_encode_its_image_once(self) -> None:
        engine = Harness(images=ROOMY)
        prompt = prompt_of(5, ("cat", 9), 6)
        request = serve(engine, prompt, n=3)
        assert n_encoded(engine) == 1
        assert [engine.output(request, index) for index in range(3)] == [
            told(prompt, 4, seed) for seed in (3, 4, 5)
        ]

    def test_states_are_saved_at_both_ends_of_an_image(self) -> None:
        engine = Harness(groups=(RecurrentGroup(16, 32, 4, 512),), images=ROOMY)
        serve(engine, prompt_of(6, ("cat", 9), 6))
        other = serve(engine, prompt_of(6, ("dog", 9), 6))
        assert engine.usage(other).cached_tokens == 6
        ids, images = prompt_of(6, ("cat", 9))
        question = serve(engine, ([*ids, 7, 7, 7], images))
        assert engine.usage(question).cached_tokens == 15


class TestEncoding:
    def test_a_chunk_stops_before_an_image_and_stages_spread_over_steps(self) -> None:
        engine = Harness(step_tokens=16, images=TAKES)
        prompt = prompt_of(14, ("cat", 24), 4)
        request = serve(engine, prompt)
        works = [[each.n_stages for each in plan.encode] for plan in engine.plans]
        assert sum(map(sum, works)) == TAKES.n_stages
        assert works.count([]) < len(works) - 1
        last = max(step for step, work in enumerate(works) if work)
        before = [row for plan in engine.plans[:last] for row in plan.rows]
        assert all(len(row.tokens) + row.start <= 14 for row in before)  # type: ignore[union-attr]
        assert engine.output(request) == told(prompt, 4)

    def test_those_that_wait_for_one_image_encode_it_once(self) -> None:
        engine = Harness(images=ROOMY)
        prompts = [prompt_of(n, ("cat", 9), 6) for n in (1, 2, 3)]  # which share nothing else
        for n, (ids, images) in enumerate(prompts):
            prompts[n] = [41 + n, *ids[1:]], images
        requests = [add(engine, prompt, client=str(n)) for n, prompt in enumerate(prompts)]
        engine.finish()
        assert n_encoded(engine) == 1
        features = engine.scheduler.images
        assert features is not None
        assert (features.stats().encoded, features.stats().reused) == (1, 2)
        assert [engine.output(each) for each in requests] == [told(each, 4) for each in prompts]

    def test_an_image_at_the_very_start_is_encoded_before_anything_is_computed(self) -> None:
        engine = Harness(step_tokens=16, images=TAKES)
        prompt = prompt_of(("cat", 24), 1)
        request = add(engine, prompt)
        plan = engine.step()
        assert plan.encode
        assert not plan.rows
        engine.finish()
        assert engine.output(request) == told(prompt, 4)

    def test_large_images_that_do_not_fit_together_come_one_after_another(self) -> None:
        engine = Harness(n_blocks=256, images=TAKES, max_context_tokens=400)
        prompts = [prompt_of(n, (f"a{n}", 24), 1, (f"b{n}", 20), 2) for n in range(1, 7)]
        requests = [add(engine, prompt, client=str(n)) for n, prompt in enumerate(prompts)]
        engine.finish()
        assert n_encoded(engine) == 12
        assert [engine.output(each) for each in requests] == [told(each, 4) for each in prompts]

    def test_small_images_do_not_overtake_a_large_one_for_ever(self) -> None:
        engine = Harness(n_blocks=256, images=TAKES, max_running=4, max_context_tokens=400)
        add(engine, prompt_of(1, ("small", 8), 2), 1, client="b")
        large = add(engine, prompt_of(2, ("large", 24), 3), 1, client="a")
        for n in range(30):
            add(engine, prompt_of(3, (f"small{n}", 8), 2), 1, client="b")
            engine.step()
            if any(event.finish_reason for event in engine.events[large]):
                break
        assert n < 12

    def test_decodes_go_on_and_other_prompts_have_their_turns_meanwhile(self) -> None:
        engine = Harness(n_blocks=256, step_tokens=24, images=TAKES, step_stretch=1.5)
        decoding = add(engine, prompt_of(4), 60)
        engine.step()
        add(engine, prompt_of(3, *[(f"{n}", 20) for n in range(4)], 2), client="images")
        text = add(engine, prompt_of(30), client="text")
        for _ in range(30):
            before = len(engine.output(decoding))
            engine.step()
            assert len(engine.output(decoding)) == before + 1
        assert engine.reason(text) is FinishReason.LENGTH

    def test_nothing_is_needed_when_all_have_ended(self) -> None:
        engine = Harness(images=ROOMY)
        random = Random(4)
        for n in range(12):
            add(engine, prompt_of(3, (f"{n % 3}", 8), 2), 3, client=str(n % 2))
            engine.step()
            if n % 3 == 0:
                engine.scheduler.abort(f"request-{random.randrange(n + 1)}")
        engine.finish()
        images = engine.scheduler.images
        assert images is not None
        assert not [*filter(None, images.problems())]
        images.forget_unneeded()
        assert images.stats().feature_bytes == 0


class Losing(Harness):
    """Steps that are lost are computed again, as by the engine's loop."""

    def compute(self, step: Step) -> None:
        try:
            super().compute(step)
        except StepLost as error:
            self.scheduler.failed_steps.recompute(step, error.not_encoded)
            if isinstance(error, StorageLost):
                self.scheduler.failed_steps.recompute_all()
                self.store.clear()
                self.store.forget_cleared()


class TestFailures:
    def test_an_image_that_cannot_be_encoded_ends_those_that_have_it_and_no_others(self) -> None:
        engine = Harness(images=ROOMY)
        faults = iter([True, False])
        engine.runner.tower.fault = lambda: next(faults, False)
        first = add(engine, prompt_of(3, ("cat", 8), 2), client="a")
        text = add(engine, prompt_of(9), client="b")
        engine.finish()
        assert engine.reason(first) is FinishReason.ERROR
        assert "injected" in (engine.end(first).error or "")
        assert engine.reason(text) is FinishReason.LENGTH
        again = serve(engine, prompt_of(3, ("cat", 8), 2))
        assert engine.output(again) == told(prompt_of(3, ("cat", 8), 2), 4)

    @pytest.mark.parametrize("error", [StepLost, StorageLost])
    @pytest.mark.parametrize("at", range(1, 9))
    def test_what_a_lost_step_was_to_encode_is_encoded_again(
        self, error: type[StepLost], at: int
    ) -> None:
        engine = Losing(step_tokens=16, images=TAKES)
        prompt = prompt_of(4, ("cat", 24), 4)
        calls = count()

        def fault() -> None:
            if next(calls) == at:
                raise error("lost")

        engine.fault = fault
        request = add(engine, prompt)
        engine.finish()
        assert engine.output(request) == told(prompt, 4)

    @pytest.mark.parametrize("at", range(1, 9))
    def test_a_step_that_is_lost_with_an_image_ends_those_that_have_it_and_no_others(
        self, at: int
    ) -> None:
        engine = Losing(n_blocks=256, step_tokens=16, images=ROOMY)
        prompts = {
            "lost": prompt_of(4, ("cat", 24), 4),
            "text": prompt_of(9),
            "kept": prompt_of(2, ("dog", 20), 3),
        }
        digest, calls = prompts["lost"][1][0].digest, count()

        def fault() -> None:
            encoded = any(work.image.digest == digest for work in engine.plans[-1].encode)
            if encoded and next(calls) == at % 4:
                raise StepLost("lost", {digest: "the cat cannot be encoded"})

        engine.fault = fault
        requests = {name: add(engine, each, 12, client=name) for name, each in prompts.items()}
        engine.finish()
        assert engine.end(requests["lost"]).error == "the cat cannot be encoded"
        for name in ("text", "kept"):
            assert engine.output(requests[name]) == told(prompts[name], 12)
        again = serve(engine, prompts["lost"])
        assert engine.output(again) == told(prompts["lost"], 4)

    def test_who_has_planned_to_read_an_image_that_is_not_encoded_ends_too(self) -> None:
        """While the next step is planned, in which another image asks for the room of the first."""
        engine = Harness(n_blocks=256, step_tokens=400, images=TAKES)
        scheduler, (ids, images) = engine.scheduler, prompt_of(1, ("cat", 4), 2)
        reader = add(engine, (ids, images))
        encoding = scheduler.plan()
        assert encoding is not None
        assert [row.lease.planned_tokens for row in encoding.rows] == [len(ids)]
        other = add(engine, prompt_of(3, ("dog", 24), 2))
        assert scheduler.plan() is not None
        result = StepResult([Prefilled()], not_encoded={images[0].digest: "no cat"})
        scheduler.commit(encoding, result)
        engine.take(scheduler.take_events())
        assert engine.end(reader).error == "no cat"
        assert not engine.output(reader)
        assert not engine.output(other)

    def test_a_step_that_raises_ends_those_that_wait_for_its_images(self) -> None:
        engine = Harness(step_tokens=16, images=TAKES)
        request = add(engine, prompt_of(("cat", 24), 4))
        raised = iter([True])

        def fault() -> None:
            if next(raised, False):
                raise RuntimeError("out of order")

        engine.fault = fault
        engine.finish()
        assert engine.reason(request) is FinishReason.ERROR


class TestWhole:
    def test_no_chunk_cuts_an_image_whose_tokens_see_each_other(self) -> None:
        engine = Harness(step_tokens=24, images=ROOMY)
        prompt = prompt_of(10, ("cat", 24), 3, ("dog", 20), 4, is_whole=True)
        request = serve(engine, prompt)
        assert engine.output(request) == told(prompt, 4)
        starts = {start for start, _ in chunks(engine)}
        assert {10, 37} <= starts | {start for start, end in chunks(engine) if end >= 34}

    def test_a_match_that_ends_within_one_is_given_back(self) -> None:
        engine = Harness(images=TAKES)
        prompt = prompt_of(6, ("cat", 20), 5, is_whole=True)
        serve(engine, prompt, 1)
        evict_to(engine, prompt, 16)
        again = serve(engine, prompt, 2)
        assert engine.usage(again).cached_tokens == 6
        assert engine.output(again) == told(prompt, 2)

    def test_windows_and_whole_images_agree_where_to_resume(self) -> None:
        windows = (WindowGroup(0, 5, lease_slots(5, 4, 24) * 16, 4, 24),)
        engine = Harness(groups=windows, step_tokens=24, images=ROOMY)
        random = Random(1)
        for _ in range(40):
            sizes = [random.randint(1, 24) for _ in range(2)]
            prompt = prompt_of(
                random.randint(1, 9),
                (f"a{sizes[0]}", sizes[0]),
                2,
                (f"b{sizes[1]}", sizes[1]),
                3,
                is_whole=True,
            )
            request = serve(engine, prompt, 2)
            assert engine.output(request) == told(prompt, 2)

    @pytest.mark.parametrize("is_whole", [True, False])
    @pytest.mark.parametrize("n_images", [1, 2])
    @pytest.mark.parametrize("n_clients", [1, 2, 3, 4])
    def test_short_prompts_that_keep_coming_do_not_hold_one_up(
        self, n_clients: int, n_images: int, is_whole: bool
    ) -> None:
        """It is the first chunk of its step, though its client and others have other prompts. Two
        clients with images take turns.
        """
        engine = Harness(step_tokens=24, images=ROOMY, max_running=20)
        images = [
            add(engine, prompt_of(2, (f"cat{at}", 24), 3, is_whole=is_whole), client=str(at))
            for at in range(n_images)
        ]
        numbers = count(100)
        for _ in range(24):
            for client in reversed(range(n_clients)):
                ids = [next(numbers) % 40 for _ in range(6)]
                engine.add([next(numbers) % 7, *ids], 1, client=str(client))
            engine.step()
        assert all(map(engine.output, images))
        engine.finish()

    def test_what_a_model_cannot_hold_is_said_in_words(self) -> None:
        assert not whole_images_problem(256, 2048, has_states=False)
        assert "step_tokens" in whole_images_problem(256, 128, has_states=False)
        assert "recurrent" in whole_images_problem(256, 2048, has_states=True)


class TestIds:
    def test_penalties_leave_out_parts_of_images(self) -> None:
        ids, images = prompt_of(3, ("cat", 8), 2, ("dog", 1), 2)
        sampling = SamplingParams(seed=3, repetition_penalty=1.5)
        engine = Harness(images=ROOMY)
        request = engine.add(ids, sampling=sampling, images=images)
        entry = batch_entry(engine.sequence(request))
        assert PART not in entry.sampling.prompt_tokens
        assert [*entry.sampling.prompt_tokens] == [token for token in ids if token != PART]
        assert entry.images == images

    def test_scores_leave_out_parts_of_images(self) -> None:
        engine = Harness(images=ROOMY)
        prompt = prompt_of(5, ("cat", 9), 6)
        request = serve(engine, prompt, prompt_logprobs=1)
        entries = [one for event in engine.events[request] for one in event.prompt_logprobs]
        assert [entry is None for entry in entries] == [
            at == 0 or token == PART for at, token in enumerate(prompt[0])
        ]

    def test_a_sent_placeholder_is_a_token_as_any_other(self) -> None:
        engine = Harness(images=ROOMY)
        sent = [1, 2, PART, PART, 3]
        request = engine.serve(sent, 6)
        assert engine.output(request) == told((sent, ()), 6)
        assert n_encoded(engine) == 0

    def test_a_draft_stops_before_an_image(self) -> None:
        engine = Harness(images=ROOMY)
        ids, images = prompt_of(9, ("cat", 8), 3)
        serve(engine, (ids, images))
        sequence = engine.sequence(engine.add(ids[:6], 20))
        found = engine.store.continuation(sequence.namespace, sequence.tokens, 10)
        assert found[:3] == tuple(ids[6:9])
        assert min(found[3:]) > VOCAB_SIZE
        engine.finish()


def _refused(**changes: object) -> str:
    ids, images = prompt_of(3, ("cat", 8), 2)
    image = images[0]
    request = Request("r", pack(ids), 4, images=(image,))
    request = replace(request, **changes)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as error:
        Harness(images=ROOMY).scheduler.prepare(request)
    assert error.value.param == "images"
    return str(error.value)


def _image(runs: Sequence[tuple[int, int]], **more: bool) -> tuple[Image, ...]:
    return (Image(bytes(32), tuple(runs), (1,), "", **more),)


class TestValidation:
    def test_what_is_right_is_accepted(self) -> None:
        ids, images = prompt_of(3, ("cat", 8), 2, ("dog", 24), 1)
        Harness(images=ROOMY).scheduler.prepare(Request("r", pack(ids), 4, images=images))

    def test_a_model_without_images_refuses_them(self) -> None:
        ids, images = prompt_of(3, ("cat", 8), 2)
        with pytest.raises(InvalidRequest, match="takes no images"):
            Harness().scheduler.prepare(Request("r", pack(ids), 4, images=images))

    @pytest.mark.parametrize(
        ("runs", "message"),
        [
            ([], "no tokens"),
            ([(3, 0)], "no tokens"),
            ([(2, 8)], "not all of them"),
            ([(5, 9)], "within the prompt"),
            ([(7, 4), (3, 2)], "must come after"),
            ([(3, 4), (5, 2)], "must come after"),
            ([(-1, 2)], "must come after"),
        ],
    )
    def test_runs_that_are_wrong_are_refused(
        self, runs: list[tuple[int, int]], message: str
    ) -> None:
        assert message in _refused(images=_image(runs))

    def test_a_prompt_does_not_end_with_an_image(self) -> None:
        assert "ends with an image" in _refused(prompt=pack([1, PART]), images=_image([(1, 1)]))

    def test_images_have_no_more_tokens_than_the_model_takes(self) -> None:
        prompt = pack([1, *[PART] * 30, 1])
        assert "at most 24" in _refused(prompt=prompt, images=_image([(1, 30)]))

    def test_an_image_that_is_computed_as_a_whole_fits_into_a_step(self) -> None:
        prompt = pack([1, PART, PART, *[1] * 40, PART, 1])
        images = _image([(1, 2), (43, 1)], is_whole=True)
        assert "step_tokens" in _refused(prompt=prompt, images=images)


def test_a_draft_source_never_drafts_an_image() -> None:
    engine = Harness(images=ROOMY)
    ids, images = prompt_of(9, ("cat", 8), 3)
    request = engine.add(ids, 20, images=images)

    def placeholders(output: Sequence[int], most: int) -> Draft:
        return Draft((PART,) * most, 0, DraftSource.OWN)

    engine.speculate(request, placeholders)
    engine.finish()
    assert engine.output(request) == told((ids, images), 20)
