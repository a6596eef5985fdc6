"""Checkpoints that are not whole are refused in a line that says what is wrong with them."""

import json
from pathlib import Path

import pytest

from engine.api import ModelError
from engine.mlx_backend.loading.locate import find_checkpoint

SHARDS = tuple(f"model-0000{i}-of-00004.safetensors" for i in range(1, 5))
INDEX = "model.safetensors.index.json"
GENERATION_CONFIG = "generation_config.json"


def write_shard(file: Path, tensor: str) -> None:
    """A safetensors file of one tensor of four bytes."""
    header = json.dumps({tensor: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    for shard in SHARDS:
        write_shard(tmp_path / shard, shard)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {shard: shard for shard in SHARDS}}))
    return tmp_path


def refusal(checkpoint: Path) -> str:
    with pytest.raises(ModelError) as refused:
        find_checkpoint(str(checkpoint), download=False)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_whole_checkpoint_is_found(checkpoint: Path) -> None:
    assert find_checkpoint(str(checkpoint), download=False) == checkpoint


@pytest.mark.parametrize("content", [b"{}", b'{"temperature": 0.', b"version https://git-lfs"])
def test_a_generation_config_may_be_cut_short(checkpoint: Path, content: bytes) -> None:
    (checkpoint / GENERATION_CONFIG).write_bytes(content)
    assert find_checkpoint(str(checkpoint), download=False) == checkpoint


@pytest.mark.parametrize("content", [b"[0.6]", b"null", b"\xff\xfe{\x00}\x00", b"[" * 100_000])
def test_a_generation_config_that_mlx_lm_cannot_take_is_named(
    checkpoint: Path, content: bytes
) -> None:
    (checkpoint / GENERATION_CONFIG).write_bytes(content)
    assert refusal(checkpoint).startswith(f"{checkpoint / GENERATION_CONFIG} ")


def test_missing_shards_are_an_incomplete_download(checkpoint: Path) -> None:
    (checkpoint / SHARDS[1]).unlink()
    (checkpoint / SHARDS[3]).unlink()
    said = "incomplete download: 2 of 4 weight files are missing: "
    assert refusal(checkpoint).startswith(f"{said}{SHARDS[1]}, {SHARDS[3]}")
    for shard in (SHARDS[0], SHARDS[2]):
        (checkpoint / shard).unlink()
    assert "4 of 4 weight files are missing" in refusal(checkpoint)
    assert "and 1 more" in refusal(checkpoint)


def test_a_link_to_nothing_is_a_missing_shard(checkpoint: Path) -> None:
    (checkpoint / INDEX).unlink()
    (checkpoint / SHARDS[0]).unlink()
    (checkpoint / SHARDS[0]).symlink_to("blobs/0123")
    assert "1 of 4 weight files is missing: " + SHARDS[0] in refusal(checkpoint)


def test_an_index_that_is_out_of_date_does_no_harm(checkpoint: Path) -> None:
    named = dict.fromkeys(SHARDS, "model-00001-of-00002.safetensors")
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": named}))
    assert find_checkpoint(str(checkpoint), download=False) == checkpoint
    (checkpoint / INDEX).write_text("{")
    assert find_checkpoint(str(checkpoint), download=False) == checkpoint


@pytest.mark.parametrize("where", ["", ".cache/huggingface/download", "../../blobs"])
def test_a_download_that_was_broken_off_is_told(checkpoint: Path, where: str) -> None:
    snapshot = checkpoint / "snapshots" / "0123"
    (snapshot / where).resolve().mkdir(parents=True, exist_ok=True)
    snapshot.mkdir(parents=True, exist_ok=True)
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    assert "not a checkpoint that MLX can load" in refusal(snapshot)
    (snapshot / where).resolve().joinpath("0123.incomplete").write_bytes(b"half")
    assert refusal(snapshot).startswith("incomplete download: the weights are missing")


def test_a_truncated_file_is_an_incomplete_download(checkpoint: Path) -> None:
    whole = (checkpoint / SHARDS[0]).read_bytes()
    for length in (0, 5, 20, len(whole) - 1):
        (checkpoint / SHARDS[0]).write_bytes(whole[:length])
        said = refusal(checkpoint)
        assert said.startswith("incomplete download")
        assert f"{SHARDS[0]} has {length} " in said


def placed(offsets: str) -> str:
    return f'{{"a": {{"dtype": "F32", "shape": [1], "data_offsets": {offsets}}}}}'


@pytest.mark.parametrize(
    "text",
    [
        *("<html>404</html>" * 9, "[]", '{"a": 1}', '{"a": {}}'),
        *(placed(offsets) for offsets in ("[0]", '[0, "4"]', "[4, 0]", "[-4, 0]", "[0, 0.5]")),
    ],
)
def test_other_files_are_no_weights(checkpoint: Path, text: str) -> None:
    (checkpoint / SHARDS[0]).write_text(text)
    assert "no safetensors file" in refusal(checkpoint)
    header = text.encode()
    (checkpoint / SHARDS[0]).write_bytes(len(header).to_bytes(8, "little") + header)
    assert "no safetensors file" in refusal(checkpoint)


def test_a_pointer_of_git_lfs_is_told(checkpoint: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 9\n"
    (checkpoint / SHARDS[0]).write_text(pointer)
    assert "git lfs pull" in refusal(checkpoint)


@pytest.mark.parametrize("text", ["", "{", '{"a": "\udce9"}', "[" * 100_000])
def test_a_configuration_that_is_no_json(checkpoint: Path, text: str) -> None:
    (checkpoint / "config.json").write_text(text, errors="surrogateescape")
    assert "config.json cannot be read" in refusal(checkpoint)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{}", "names no model_type"),
        ('{"model_type": ["llama"]}', "names no model_type"),
        ("[1]", "is not a JSON object"),
        ("null", "is not a JSON object"),
    ],
)
def test_a_configuration_of_no_model(checkpoint: Path, text: str, problem: str) -> None:
    (checkpoint / "config.json").write_text(text)
    assert f"config.json {problem}" in refusal(checkpoint)


def test_what_is_missing_altogether_is_named(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    assert refusal(checkpoint).endswith("has no tokenizer: tokenizer.json is missing")
    (checkpoint / "config.json").unlink()
    assert "config.json" in refusal(checkpoint)
