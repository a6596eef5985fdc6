"""What is remembered of answers, for how long, and that it stays in its namespace."""

from hypothesis import given
from hypothesis import strategies as st

from engine.drafts.sources import Answers
from kvstore.types import Namespace

HERE, THERE = Namespace("m"), Namespace("m", cache_salt="tenant")


def answer_of(start: int, n_tokens: int) -> list[int]:
    return list(range(start, start + n_tokens))


def test_the_oldest_go_first() -> None:
    answers = Answers(max_tokens=44)
    for start in (100, 200, 300, 400):
        answers.add(HERE, answer_of(start, 10))
    assert len(answers) == 44
    answers.add(HERE, answer_of(500, 10))
    found = [answers.propose(HERE, answer_of(start, 3), 1)[1] for start in range(100, 600, 100)]
    assert found == [0, 0, 3, 3, 3]


def test_the_longer_occurrence_counts_then_the_newer() -> None:
    answers = Answers(max_tokens=20)
    answers.add(HERE, [7, 1, 2, 3, 4, 6, 6, 6])
    answers.add(HERE, [8, 1, 2, 3, 5, 6, 6, 6])
    assert answers.propose(HERE, [7, 1, 2, 3], 1) == ((4,), 4)
    assert answers.propose(HERE, [1, 2, 3], 1) == ((5,), 3)


def test_of_an_answer_that_is_too_long_the_end_is_kept() -> None:
    answers = Answers(max_tokens=20)
    answers.add(HERE, answer_of(0, 100))
    assert len(answers) == 10
    assert answers.propose(HERE, [91, 92, 93], 9) == ((94, 95, 96, 97, 98, 99), 3)
    assert answers.propose(HERE, [90, 91, 92], 9) == ((), 0)


def test_nothing_is_kept_where_there_is_no_room() -> None:
    answers = Answers(max_tokens=0)
    answers.add(HERE, answer_of(0, 100))
    assert len(answers) == 0


tokens = st.lists(st.integers(0, 3), max_size=12)


@given(st.lists(tokens), st.lists(tokens), st.data())
def test_nothing_crosses_a_namespace(
    ours: list[list[int]], theirs: list[list[int]], data: st.DataObject
) -> None:
    """What others have added changes nothing, except that it makes older answers go."""
    alone, shared = Answers(), Answers()
    added = [(HERE, one) for one in ours] + [(THERE, one) for one in theirs]
    for namespace, one in data.draw(st.permutations(added)):
        shared.add(namespace, one)
        if namespace == HERE:
            alone.add(namespace, one)
    last = data.draw(tokens)
    assert shared.propose(HERE, last, 9) == alone.propose(HERE, last, 9)
    assert shared.propose(Namespace("other"), last, 9) == ((), 0)
    shared.clear(THERE)
    assert len(shared) == len(alone)
    assert shared.propose(THERE, last, 9) == ((), 0)
    assert shared.propose(HERE, last, 9) == alone.propose(HERE, last, 9)
    shared.clear()
    assert (len(shared), shared.propose(HERE, last, 9)) == (0, ((), 0))


@given(st.integers(0, 40), st.lists(st.tuples(st.sampled_from([HERE, THERE]), tokens)), tokens)
def test_what_is_proposed_stands_in_one_of_the_latest_answers_of_the_namespace(
    most_tokens: int, added: list[tuple[Namespace, list[int]]], last: list[int]
) -> None:
    answers = Answers(most_tokens)
    for namespace, one in added:
        answers.add(namespace, one)
        assert len(answers) <= most_tokens
    proposed, matched = answers.propose(HERE, last, 9)
    if matched:
        run = [*last[-matched:], *proposed]
        own = [one for namespace, one in added if namespace == HERE]
        assert any(
            one[at : at + len(run)] == run for one in own for at in range(len(one) - len(run) + 1)
        )
