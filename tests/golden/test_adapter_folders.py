"""What is wrong with an adapter's folder is said in one line, which names adapter and key."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.api import ModelError
from engine.mlx_backend.assembly import describe
from engine.mlx_backend.blas import Blas
from engine.mlx_backend.loading.adapter_files import CONFIG, WEIGHTS
from engine.mlx_backend.loading.loader import open_model
from engine.values.settings import AdapterConfig, EngineConfig
from tests.adapters import write_adapter, write_folder

GOOD = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": {"rank": 2, "scale": 1.0}}
PROJECTION = "model.layers.0.self_attn.q_proj"
"""From 64 to 128 in the checkpoint."""


def refusal(checkpoint: Path, folder: Path) -> str:
    with pytest.raises(ModelError) as refused:
        open_model(checkpoint, 1 << 30, adapter_configs=[AdapterConfig("mine", folder)])
    return str(refused.value)


def matrices(path: str = PROJECTION, inputs: int = 64, outputs: int = 128) -> dict[str, mx.array]:
    return {f"{path}.lora_a": mx.ones((inputs, 2)), f"{path}.lora_b": mx.ones((2, outputs))}


@pytest.fixture
def llama(checkpoint_of: Callable[[str], Path]) -> Path:
    return checkpoint_of("llama")


def test_a_folder_that_is_not_there(llama: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert refusal(llama, nowhere) == f"adapter mine: there is no directory {nowhere}"


@pytest.mark.parametrize("missing", [CONFIG, WEIGHTS])
def test_a_folder_that_lacks_a_file(llama: Path, tmp_path: Path, missing: str) -> None:
    write_folder(tmp_path, matrices(), GOOD)
    (tmp_path / missing).unlink()
    assert f"adapter mine: {tmp_path} has no {missing}" in refusal(llama, tmp_path)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "cannot be read: Expecting property name"),
        ("[]", "is not a JSON object"),
        ("\xff", "cannot be read: 'utf-8' codec"),
        (json.dumps({**GOOD, "fine_tune_type": "dora"}), "'dora'; only lora is served"),
        (json.dumps({**GOOD, "fine_tune_type": "full"}), "'full'; only lora is served"),
        (json.dumps({**GOOD, "lora_parameters": {"rank": 2}}), "lora_parameters.scale"),
        (json.dumps({**GOOD, "lora_parameters": {"scale": "2"}}), "lora_parameters.scale"),
        (json.dumps({"fine_tune_type": "lora"}), "lora_parameters.scale"),
    ],
)
def test_a_configuration_that_is_none(llama: Path, tmp_path: Path, text: str, fault: str) -> None:
    write_folder(tmp_path, matrices(), GOOD)
    (tmp_path / CONFIG).write_text(text, "latin-1")
    said = refusal(llama, tmp_path)
    assert said.startswith(f"adapter mine: {tmp_path / CONFIG}")
    assert fault in said


@pytest.mark.parametrize("kept_bytes", [0, 4, 200])
def test_weights_that_are_cut_off(llama: Path, tmp_path: Path, kept_bytes: int) -> None:
    write_folder(tmp_path, matrices(), GOOD)
    file = tmp_path / WEIGHTS
    file.write_bytes(file.read_bytes()[:kept_bytes])
    assert refusal(llama, tmp_path).startswith("adapter mine: incomplete download")


@pytest.mark.parametrize(
    ("weights", "fault"),
    [
        ({}, "has no tensors"),
        (
            matrices(inputs=63),
            f"{PROJECTION}.lora_a has the shape (63, 2); with this model it is (64, 2)",
        ),
        (
            matrices(outputs=129),
            f"{PROJECTION}.lora_b has the shape (2, 129); with this model it is (2, 128)",
        ),
        (
            matrices() | {f"{PROJECTION}.lora_b": mx.ones((3, 128))},
            f"{PROJECTION}.lora_a has the shape (64, 2); with this model it is (64, 3)",
        ),
        ({f"{PROJECTION}.lora_a": mx.ones((64, 2))}, f"{PROJECTION}.lora_b is missing"),
        ({f"{PROJECTION}.lora_b": mx.ones((2, 128))}, f"{PROJECTION}.lora_a is missing"),
        (
            matrices() | {f"{PROJECTION}.lora_a": mx.ones(64)},
            f"{PROJECTION}.lora_a has the shape (64,), and is no matrix",
        ),
        (matrices() | {f"{PROJECTION}.m": mx.ones(64)}, f"{PROJECTION}.m is no matrix of a LoRA"),
        (
            matrices("model.layers.99.self_attn.q_proj"),
            "model.layers.99.self_attn.q_proj: the model has no such layer",
        ),
        (
            matrices("model.embed_tokens"),
            "model.embed_tokens is no linear layer but Embedding: its adapters are not served",
        ),
        (matrices("lm_head", outputs=320), "lm_head makes the logits"),
    ],
)
def test_weights_that_do_not_fit(
    llama: Path, tmp_path: Path, weights: Mapping[str, mx.array], fault: str
) -> None:
    write_folder(tmp_path, weights, GOOD)
    said = refusal(llama, tmp_path)
    assert said.startswith("adapter mine: ")
    assert fault in said


def test_experts_are_refused(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    checkpoint = checkpoint_of("qwen3_moe")
    write_adapter(checkpoint, tmp_path, seed=1)
    assert "is no linear layer but SwitchLinear: its adapters are not served" in refusal(
        checkpoint, tmp_path
    )


def test_the_attention_of_a_mixture_is_served(
    checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint = checkpoint_of("qwen3_moe")
    write_adapter(checkpoint, tmp_path, seed=1, keys=["self_attn.q_proj", "self_attn.v_proj"])
    loaded = open_model(checkpoint, 1 << 30, adapter_configs=[AdapterConfig("mine", tmp_path)])
    assert list(loaded.adapters) == ["mine"]


def test_the_doctor_says_the_same(llama: Path, tmp_path: Path) -> None:
    config = EngineConfig(str(llama), adapters=(AdapterConfig("mine", tmp_path / "nowhere"),))
    assert describe(config, Blas()).problem.startswith("adapter mine: there is no directory")


@pytest.mark.parametrize("changed", ["weights", "config"])
def test_the_fingerprint_changes_with_either_file(
    llama: Path, tmp_path: Path, changed: str
) -> None:
    def fingerprint(weights: Mapping[str, mx.array], config: Mapping[str, Any]) -> str:
        folder = write_folder(tmp_path / "one", weights, config)
        return open_model(llama, 1 << 30, adapter_configs=[AdapterConfig("mine", folder)]).adapters[
            "mine"
        ]

    first = fingerprint(matrices(), GOOD)
    other = {name: 2 * matrix for name, matrix in matrices().items()}
    if changed == "weights":
        assert fingerprint(other, GOOD) != first
    else:
        assert fingerprint(matrices(), {**GOOD, "lora_parameters": {"scale": 2.0}}) != first
    assert fingerprint(matrices(), GOOD) == first
