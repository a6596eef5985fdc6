"""A dozen architectures that the golden tests do not have; `make conformance` runs all."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
from mlx_lm.utils import load_model

from measuring.random_checkpoint import CONFIGS
from tests.checkpoints import FAMILIES, write_family
from tests.conformance import document
from tests.conformance.cases import CASES
from tests.conformance.examiner import ERROR_TOLERANCE, Examiner
from tests.conformance.outcome import Outcome, Verdict
from tests.conformance.trial import attempt
from tests.offline import load

SERVED = {
    "afm7": "full attention",  # layers that read another's KV
    "baichuan_m1": "full attention, recurrent, window 8",
    "deepseek_v41, a ratio of 16": "groups of 16, window 8",
    "gemma2": "full attention",  # masks for each KV head
    "granitemoehybrid": "full attention, recurrent",
    "kimi_linear": "full attention, recurrent",  # latent attention
    "longcat_flash_ngram": "full attention, recurrent",  # token ids for a state, two caches a layer
    "mimo_v2_flash": "full attention, window 8",  # heads differ by layer
    "minimax_m3_vl": "full attention",  # an indexer without values
    "nemotron-nas": "full attention",  # layers without attention
    "olmo_hybrid": "full attention, recurrent",
    "plamo3": "full attention, window 9",  # asks for one token more than it keeps
    "gemma3_text, 4 bit": "full attention, window 8",
}


FAST = {"gemma2", "kimi_linear", "olmo_hybrid", "gemma3_text, 4 bit"}
"""One of each kind of cache and masks; the others are slow tests."""


@pytest.mark.parametrize(
    ("name", "keeps"),
    [
        pytest.param(name, keeps, id=name, marks=() if name in FAST else pytest.mark.slow)
        for name, keeps in SERVED.items()
    ],
)
def test_served_as_mlx_lm_says(name: str, keeps: str, tmp_path: Path) -> None:
    outcome = attempt(CASES[name], tmp_path)
    assert outcome.reason == ""
    assert outcome.verdict is Verdict.SERVED
    assert outcome.keeps == keeps


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("olmo", "mlx-lm cannot run it: its model fails for two tokens or more"),
        ("phi3small", "mlx-lm's model is not causal: later tokens change an earlier token's"),
    ],
)
def test_refused_by_reason(name: str, reason: str, tmp_path: Path) -> None:
    outcome = attempt(CASES[name], tmp_path)
    assert outcome.verdict is Verdict.REFUSED
    assert outcome.reason.startswith(reason)


def test_what_is_served_wrong_is_found(tmp_path: Path) -> None:
    """A model judged by another's weights, as if its blocks held other tokens."""
    ours, other = (write_family(FAMILIES["qwen3"], tmp_path, seed) for seed in (0, 1))
    examiner = Examiner(load(ours), load_model(other)[0])
    examiner.examine()
    assert "below mlx-lm's best" in examiner.problems[0]
    assert examiner.largest_error() > ERROR_TOLERANCE


def architectures() -> list[str]:
    """The modules of `mlx_lm.models` that define or re-export a `Model`, in order."""
    spec = find_spec("mlx_lm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    directory = Path(spec.submodule_search_locations[0]) / "models"
    return sorted(path.stem for path in directory.glob("*.py") if _has_model(path))


def _has_model(path: Path) -> bool:
    return any(_defines_model(node) for node in ast.parse(path.read_text(encoding="utf-8")).body)


def _defines_model(node: ast.stmt) -> bool:
    match node:
        case ast.ClassDef(name="Model"):
            return True
        case ast.ImportFrom(names=names):
            return any((name.asname or name.name) == "Model" for name in names)
        case _:
            return False


def test_every_architecture_of_mlx_lm_has_a_config() -> None:
    """Fails when mlx-lm is updated: new ones want a tiny config."""
    assert sorted({config["model_type"] for config in CONFIGS.values()}) == architectures()


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        ("no module: No module named 'x'", "no module: No module named 'x'"),
        (
            "cannot load: ValueError for y: it must be in ('a', 'b', ...",
            "cannot load: ValueError for y",
        ),
        ("layer 0 keeps z; served are full attention and states", "layer 0 keeps z"),
        ("not the same (joined rows: shapes differ; padded rows: too)", "not the same"),
    ],
)
def test_a_line_of_the_document_has_the_first_clause_of_a_reason(reason: str, line: str) -> None:
    text = document.render([Outcome("olmo", Verdict.REFUSED, reason=reason)], [])
    assert f"- `olmo`: refused, {line}\n" in text


def test_the_document_says_what_was_served() -> None:
    served = Outcome("qwen3", Verdict.SERVED, "full attention", "padded rows", 1e-6)
    refused = Outcome("olmo", Verdict.REFUSED, reason="a | b")
    quantized = Outcome("qwen3_next, 4 bit", Verdict.WRONG, "recurrent", "padded rows", 0.5, "x")
    text = document.render([served, refused, quantized], [])
    assert "2 architectures: **1 served, 1 refused**" in text
    assert document.served_column(text) == {
        "qwen3": True,
        "olmo": False,
        "qwen3_next, 4 bit": False,
    }


def test_the_document_says_which_decodes_are_not_compiled_and_why() -> None:
    for compiled, lines in (("yes", ""), ("a | b (of layer 2)", "- `qwen3`: a | b\n"), ("", "")):
        made = ("qwen3", Verdict.SERVED, "full attention", "padded rows", 1e-6, "", compiled)
        text = document.render([Outcome(*made)], [])
        assert f"compiled, except for:\n\n{lines}\n" in text
        assert document.served_column(text) == {"qwen3": True}
