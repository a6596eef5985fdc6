"""Log-probabilities as completions show them."""

from engine.values.output import TokenLogprob
from server.dialects.completions import ChoiceText
from tests.contract.fake_engine import ByteTokenizer


def test_the_chosen_token_is_among_the_top_ones() -> None:
    entry = TokenLogprob(ord("a"), -3.0, top=((ord("b"), -0.1),))
    _, lists = ChoiceText("", (), ByteTokenizer()).add("a", [entry], [])
    assert lists is not None
    assert lists["top_logprobs"] == [{"b": -0.1, "a": -3.0}]
