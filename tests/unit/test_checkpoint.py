"""What a checkpoint's files say of its model is what the loaded model and its tokenizer say."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from engine.api import ModelError
from engine.mlx_backend.loading.checkpoint import DEFAULT_CHECKPOINT, Checkpoint
from engine.mlx_backend.loading.locate import open_checkpoint
from engine.text.tokenizer import CheckpointTokenizer
from engine.values.model import TemplateKind
from tests.checkpoints import FAMILIES, write_family

NAMED = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    shutil.copytree(DEFAULT_CHECKPOINT, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def change(file: Path, **fields: Any) -> None:
    """Set fields of a JSON object; None removes one."""
    content = json.loads(file.read_text("utf-8")) | fields
    kept = {name: value for name, value in content.items() if value is not None}
    file.write_text(json.dumps(kept), "utf-8")


def as_it_is(directory: Path) -> None:
    pass


def without_a_template(directory: Path) -> None:
    change(directory / "tokenizer_config.json", chat_template=None)


def with_named_templates(directory: Path) -> None:
    change(directory / "tokenizer_config.json", chat_template=NAMED)


def with_a_file(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("in a file", "utf-8")


def with_several_files(directory: Path) -> None:
    with_a_file(directory)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates/tool_use.jinja").write_text("for tools", "utf-8")


def with_tokens_of_the_config(directory: Path) -> None:
    token = {"content": "<think>", "special": False}
    change(directory / "tokenizer_config.json", added_tokens_decoder={"1023": token})


@pytest.mark.parametrize(
    "changed",
    [
        as_it_is,
        without_a_template,
        with_named_templates,
        with_a_file,
        with_several_files,
        with_tokens_of_the_config,
    ],
)
def test_template_and_added_tokens_are_those_of_the_tokenizer(
    directory: Path, changed: Callable[[Path], None]
) -> None:
    changed(directory)
    loaded = AutoTokenizer.from_pretrained(directory)
    tokenizer = CheckpointTokenizer(loaded, TemplateKind(), 100)
    checkpoint = open_checkpoint(str(directory))
    assert checkpoint.chat_template == tokenizer.chat_template
    assert set(tokenizer.added_tokens) == checkpoint.added_tokens


def test_a_template_may_be_one_of_mlx_lms(directory: Path) -> None:
    change(directory / "tokenizer_config.json", chat_template_type="deepseek_v32")
    kind = TemplateKind(module="deepseek_v32")
    tokenizer = CheckpointTokenizer(AutoTokenizer.from_pretrained(DEFAULT_CHECKPOINT), kind, 100)
    assert "def apply_chat_template" in tokenizer.chat_template
    assert Checkpoint(directory).chat_template == tokenizer.chat_template


def test_the_digest_changes_with_the_files_and_not_with_their_place_or_time(
    directory: Path, tmp_path: Path
) -> None:
    first = Checkpoint(directory).digest
    assert len(bytes.fromhex(first)) == 32
    os.utime(directory / "model.safetensors", (0, 0))
    (directory / "README.md").write_text("Not read.", "utf-8")
    shutil.copytree(directory, tmp_path / "copy")
    assert Checkpoint(tmp_path / "copy").digest == first
    digests = {first}
    with (directory / "model.safetensors").open("ab") as weights:
        weights.write(b"x")
    digests.add(Checkpoint(directory).digest)
    change(directory / "config.json", rope_theta=1.0)
    digests.add(Checkpoint(directory).digest)
    (directory / "chat_template.jinja").write_text("", "utf-8")
    digests.add(Checkpoint(directory).digest)
    assert len(digests) == 4


def test_parameters_are_counted_as_they_were_before_quantization(tmp_path: Path) -> None:
    names = ("qwen3", "qwen3_4bit", "qwen3_8bit", "qwen3_mixed")
    checkpoints = [Checkpoint(write_family(FAMILIES[name], tmp_path)) for name in names]
    assert len({checkpoint.n_bytes for checkpoint in checkpoints}) == len(names)
    counts = [checkpoint.n_parameters for checkpoint in checkpoints]
    assert counts == [counts[0]] * len(names)
    assert counts[0] == _numbers(write_family(FAMILIES["qwen3"], tmp_path)) > 10_000


def _numbers(directory: Path) -> int:
    """Of float32 weights, counted by their bytes."""
    file = directory / "model.safetensors"
    header_bytes = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    return (file.stat().st_size - header_bytes) // 4


def test_parameters_of_another_quantization_are_not_counted(directory: Path) -> None:
    change(directory / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    assert Checkpoint(directory).n_parameters is None


def test_a_file_that_cannot_be_read_is_named(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text("{", "utf-8")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json cannot be read"):
        _ = Checkpoint(directory).chat_template
