"""What of a checkpoint is refused, and with which reason; and what is not."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx_lm import utils
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from engine.api import ModelError
from engine.mlx_backend.loading.loader import open_model
from engine.text.tokenizer import pretrained_tokenizer
from measuring.random_checkpoint import CONFIGS, random_model
from tests.checkpoints import FAMILIES, write_family
from tests.offline import load

UNKNOWN_TO_TRANSFORMERS = (
    {"layer_types": ["invented_mixer", "full_attention"]},
    {"layer_types": ["full_attention"]},  # of one layer, where there are more
    {"layer_types": 7},
    {"rope_parameters": "invented"},
)
"""What transformers rejects in config.json, each for another reason."""


@pytest.mark.parametrize("settings", UNKNOWN_TO_TRANSFORMERS, ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3", "qwen3_next"])
@pytest.mark.parametrize("names_class", [True, False])
def test_a_tokenizer_is_loaded_whatever_transformers_thinks_of_the_configuration(
    tmp_path: Path, settings: dict[str, object], family: str, names_class: bool
) -> None:
    checkpoint = write_family(FAMILIES[family], tmp_path)
    expected = pretrained_tokenizer(str(checkpoint)).encode("the cat <|im_end|> sat")
    change(checkpoint / "config.json", **settings)
    if not names_class:
        change(checkpoint / "tokenizer_config.json", tokenizer_class=None)
    assert pretrained_tokenizer(str(checkpoint)).encode("the cat <|im_end|> sat") == expected


def test_a_model_with_a_type_of_layer_that_transformers_does_not_know(tmp_path: Path) -> None:
    checkpoint = write_family(FAMILIES["llama"], tmp_path)
    change(
        checkpoint / "config.json",
        layer_types=["full_attention", "invented_mixer", "full_attention"],
    )
    tokenizer = open_model(checkpoint, memory_bytes=1 << 30).tokenizer
    assert tokenizer.decode(tokenizer.encode("the cat sat")) == "the cat sat"
    (end_token,) = tokenizer.eos_token_ids
    assert tokenizer.decode([end_token]) == "<|im_end|>"


def change(file: Path, **settings: object) -> None:
    """Change a file of JSON; None removes a setting."""
    changed = json.loads(file.read_text()) | settings
    kept = {name: value for name, value in changed.items() if value is not None}
    file.write_text(json.dumps(kept))


def test_a_model_that_looks_ahead_is_refused_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_family(FAMILIES["llama"], tmp_path)
    monkeypatch.setattr(llama, "create_attention_mask", lambda *arguments, **named: None)
    with pytest.raises(ModelError, match=r"^mlx-lm's model is not causal: later tokens change an"):
        load(checkpoint)


def test_olmo_is_refused_because_mlx_lms_model_fails_with_its_own_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fails when mlx-lm has mended it: then it can be served."""
    monkeypatch.setitem(sys.modules, "hf_olmo", ModuleType("hf_olmo"))
    monkeypatch.delitem(sys.modules, "mlx_lm.models.olmo", raising=False)
    importlib.import_module("mlx_lm.models.olmo")
    model: Module = random_model(CONFIGS["olmo"], 0, mx.float32)
    mx.eval(model(mx.array([[1]]), cache=make_prompt_cache(model)))
    for cache in (make_prompt_cache(model), None):
        with pytest.raises((TypeError, ValueError)):
            mx.eval(model(mx.array([[1, 2]]), cache=cache))
    monkeypatch.delitem(sys.modules, "mlx_lm.models.olmo")


def test_a_module_that_exits_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one may that cannot import what it needs."""

    def exits(config: object) -> None:
        try:
            importlib.import_module("no_such_package")
        except ModuleNotFoundError:
            sys.exit(1)

    checkpoint = write_family(FAMILIES["llama"], tmp_path)
    monkeypatch.setattr(utils, "_get_classes", exits)
    with pytest.raises(ModelError, match=r"^mlx-lm cannot load it: No module named 'no_such"):
        open_model(checkpoint, memory_bytes=1 << 30)
