"""Loads with drafts and without: weights that count, what is asked, what counts as different."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from load_tests.drafts import command
from load_tests.drafts.bodies import EDITED_EVERY, copied, edited, tool_loop
from load_tests.drafts.loads import QUICK, SCALES, TASKS, Load, Scale, draw
from load_tests.drafts.play import Answer, Turn, answer
from load_tests.drafts.rounds import Measured, Round, differences
from load_tests.drafts.successor import EMBEDDINGS, LOGIT, OUTPUT, Weights, count
from load_tests.drafts.tables import table
from load_tests.lexicon import WORDS

WIDTH, VOCABULARY = 64, 40
WORD_IDS = [7, 3, 21, 30, 12]


def random_weights() -> Weights:
    rng = np.random.default_rng(0)
    shapes = {
        EMBEDDINGS: (VOCABULARY, WIDTH),
        "model.layers.0.self_attn.o_proj.weight": (WIDTH, WIDTH),
        "model.layers.0.mlp.down_proj.weight": (WIDTH, 2 * WIDTH),
        "model.layers.0.mlp.up_proj.weight": (2 * WIDTH, WIDTH),
    }
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def test_behind_each_word_comes_the_next_one() -> None:
    weights = random_weights()
    count(weights, WORD_IDS)
    hidden = weights[EMBEDDINGS][WORD_IDS]
    hidden *= WIDTH**0.5 / np.linalg.norm(hidden, axis=1, keepdims=True)  # as a last norm does
    logits = hidden @ weights[OUTPUT].T
    assert logits.argmax(axis=1).tolist() == [*WORD_IDS[1:], WORD_IDS[0]]
    assert logits.max(axis=1) == pytest.approx(LOGIT, rel=1e-4)
    others = np.setdiff1d(np.arange(VOCABULARY), WORD_IDS)
    assert not weights[OUTPUT][others].any()


def test_layers_that_count_add_nothing_and_compute_all() -> None:
    weights = random_weights()
    before = {name: array.copy() for name, array in weights.items()}
    count(weights, WORD_IDS)
    changed = {name for name in before if not np.array_equal(before[name], weights[name])}
    assert changed == {
        name for name in before if name.endswith(("o_proj.weight", "down_proj.weight"))
    }
    assert not any(weights[name].any() for name in changed)


def words_of(body: Any) -> tuple[list[str], str]:
    """The prompt's, and the one to go on from."""
    listed, said = body["messages"]
    return listed["content"].split(), said["content"]


def test_a_copy_is_of_words_in_order_and_an_edit_differs_now_and_then() -> None:
    words, said = words_of(copied(random.Random(1), 64, 8))
    start = WORDS.index(words[0])
    assert words == list(WORDS[start : start + 64])
    assert said == f"{words[0]} "
    others, said_first = words_of(edited(random.Random(1), 64, 8))
    assert said_first == said
    places = [i for i, pair in enumerate(zip(words, others, strict=True)) if len(set(pair)) == 2]
    assert places == [EDITED_EVERY, 2 * EDITED_EVERY, 3 * EDITED_EVERY]


def test_an_agent_asks_with_all_that_was_said_before() -> None:
    asked = tool_loop(random.Random(0))
    lengths = [len(body["messages"]) for body in asked]
    assert lengths[0] == 1
    assert lengths == sorted(set(lengths))
    assert all(body["messages"][-1]["role"] != "assistant" for body in asked)


@pytest.mark.parametrize("scale", [QUICK, *SCALES.values()])
def test_every_task_has_loads_that_are_the_same_each_time(scale: Scale) -> None:
    loads = draw(list(TASKS), scale, 0)
    assert loads == draw(list(TASKS), scale, 0)
    assert all(stream for load in loads for stream in load.streams)
    titles = [(load.name, load.model, len(load.streams)) for load in loads]
    assert len(titles) == len(set(titles))


def test_a_task_asks_the_same_whichever_others_are_chosen() -> None:
    chosen = draw(["unique"], QUICK, 0)
    assert [load for load in draw(list(TASKS), QUICK, 0) if load.name == "unique"] == chosen


def known_before(load: Load) -> list[tuple[Any, int]]:
    return [(body["messages"], body["max_tokens"]) for body in load.before]


def test_what_is_sent_again_is_answered_before_and_all_else_has_its_prompt_computed() -> None:
    tokens = QUICK.output_tokens
    for load in draw(["resend", "regenerate"], QUICK, 0):
        asked = [body["messages"] for stream in load.streams for body in stream]
        assert known_before(load) == [(messages, tokens) for messages in asked]
    for load in draw(["copy", "edit", "schema", "tools", "unique"], QUICK, 0):
        asked = [body["messages"] for stream in load.streams for body in stream]
        assert known_before(load) == [(messages, 1) for messages in asked]
    assert not any(load.before for load in draw(["mixed"], QUICK, 0))


def test_an_unknown_task_is_named_with_those_there_are() -> None:
    assert command._known(None) == list(TASKS)
    with pytest.raises(typer.BadParameter, match="nothing is none of copy, edit"):
        command._known(["copy", "nothing"])


def completion(message: dict[str, Any]) -> dict[str, Any]:
    details = {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 2}
    usage = {"completion_tokens": 9, "completion_tokens_details": details}
    return {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}


def test_an_answer_is_its_text_and_its_calls() -> None:
    assert answer(completion({"content": "hello"})) == Answer("hello [stop]", 9, 5, 2)
    calls = [{"id": "drawn", "function": {"name": "f", "arguments": "{}"}}]
    found = answer(completion({"content": None, "tool_calls": calls}))
    assert found.said == "f({}) [stop]"


def turn(seconds: float, *said: str) -> Turn:
    return Turn(seconds, tuple(Answer(each, 10, 4, 1) for each in said))


def round_of(drafted: Turn, plain: Turn) -> Round:
    return Round(drafted, plain, plain)


def test_answers_that_drafts_changed_are_shown_where_they_differ() -> None:
    assert differences(round_of(turn(1, "same", "one"), turn(2, "same", "one"))) == []
    (line,) = differences(round_of(turn(1, "same", "one"), turn(2, "same", "only")))
    assert line == "answer 1, from character 2 on: 'one' with drafts, 'only' without"
    (line,) = differences(round_of(turn(1, "abc"), turn(1, "ab")))
    assert line.startswith("answer 0, from character 2 on")


def test_answers_of_other_lengths_in_tokens_differ() -> None:
    longer = Turn(1, (Answer("same", 11, 0, 0),))
    assert len(differences(round_of(longer, turn(1, "same")))) == 1


@pytest.mark.parametrize(("changed", "status"), [((), 0), (("answer 0 is another",), 1)])
def test_the_command_fails_if_drafts_have_changed_an_answer(
    changed: tuple[str, ...],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = Measured("copy", "demo", 1, None, (round_of(turn(1, "a"), turn(2, "a")),), changed)
    monkeypatch.setattr(command, "_measure", lambda *_: [found])
    app, figures = typer.Typer(), tmp_path / "figures.json"
    app.command()(command.drafts)
    with pytest.raises(SystemExit) as ended:
        app(["--json", str(figures)])
    assert ended.value.code == status
    assert json.loads(figures.read_text())["loads"][0]["differences"] == list(changed)
    assert ("copy, demo, 1 at once: answer 0 is another" in capsys.readouterr().err) == bool(status)


def test_ratios_are_of_one_round_and_shown_with_their_range() -> None:
    rounds = tuple(
        Round(turn(seconds, "a"), turn(2.0, "a"), turn(4 * seconds, "a"))
        for seconds in (1.0, 2.0, 0.5)
    )
    measured = Measured("copy", "demo", 1, 1.8, rounds, ())
    assert [each.ratio for each in rounds] == [2.0, 1.0, 4.0]
    found = table([measured])
    assert found.rows == (
        ("copy", "demo", "1", "5", "10", "2.00 (1.00-4.00)", "0.50", "1.80", "40%", "10%"),
    )
    assert len(found.columns) == len(found.rows[0])
