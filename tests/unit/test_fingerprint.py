"""What tells checkpoints apart: config, headers, files' versions and samples of every tensor."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.api import ModelError
from engine.mlx_backend.loading.checkpoint import fingerprint

TENSORS, TENSOR_BYTES = 100, 30_000
NAMES = tuple(f"model.layers.{i}.mlp.up_proj.weight" for i in range(TENSORS))

Change = Callable[[bytes], bytes]


def header_of(names: tuple[str, ...]) -> bytes:
    offsets = (i * TENSOR_BYTES for i in range(len(names)))
    return json.dumps(
        {
            name: {"dtype": "U8", "shape": [TENSOR_BYTES], "data_offsets": [at, at + TENSOR_BYTES]}
            for name, at in zip(names, offsets, strict=True)
        }
    ).encode()


def write_weights(file: Path, names: tuple[str, ...] = NAMES) -> int:
    """Zeros alone; where the first tensor begins."""
    header = header_of(names)
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(len(names) * TENSOR_BYTES))
    return 8 + len(header)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    write_weights(directory / "model.safetensors")
    return directory


def fingerprint_at_time_0(checkpoint: Path) -> str:
    """So that the time of modification tells nothing."""
    for weights in checkpoint.glob("*.safetensors"):
        os.utime(weights, (0, 0))
    return fingerprint(checkpoint)


def write_between_samples(weights: Path) -> None:
    """Change bytes of the first tensor that are in no sample."""
    first = write_weights(weights)
    with weights.open("r+b") as opened:
        os.pwrite(opened.fileno(), b"changed", first + 5_000)


def snapshot_of(checkpoint: Path, name: str, digits: int = 64) -> Path:
    """The checkpoint as the Hugging Face cache stores it."""
    weights = (checkpoint / "model.safetensors").read_bytes()
    blob = checkpoint.parent / name / "blobs" / hashlib.sha256(weights).hexdigest()[:digits]
    snapshot = checkpoint.parent / name / "snapshots" / "main"
    blob.parent.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    blob.write_bytes(weights)
    os.utime(blob, (0, 0))
    shutil.copy(checkpoint / "config.json", snapshot)
    (snapshot / "model.safetensors").symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def every_value(tensor: bytes) -> bytes:
    return bytes(byte ^ 1 for byte in tensor)


def one_word_in_a_hundred(tensor: bytes) -> bytes:
    return bytes(byte ^ (i % 400 == 0) for i, byte in enumerate(tensor))


def the_first_half(tensor: bytes) -> bytes:
    half = len(tensor) // 2
    return every_value(tensor[:half]) + tensor[half:]


def the_middle_third(tensor: bytes) -> bytes:
    third = len(tensor) // 3
    return tensor[:third] + every_value(tensor[third:-third]) + tensor[-third:]


def the_last_byte(tensor: bytes) -> bytes:
    return tensor[:-1] + b"x"


@pytest.mark.parametrize(
    "change",
    [every_value, one_word_in_a_hundred, the_first_half, the_middle_third, the_last_byte],
)
def test_a_change_of_any_one_tensor_is_seen(checkpoint: Path, change: Change) -> None:
    weights = checkpoint / "model.safetensors"
    before, changed = bytes(TENSOR_BYTES), change(bytes(TENSOR_BYTES))
    first = write_weights(weights)
    seen = {fingerprint_at_time_0(checkpoint)}
    with weights.open("r+b", buffering=0) as opened:
        for place in range(first, first + TENSORS * TENSOR_BYTES, TENSOR_BYTES):
            os.pwrite(opened.fileno(), changed, place)
            seen.add(fingerprint_at_time_0(checkpoint))
            os.pwrite(opened.fileno(), before, place)
    assert len(seen) == 1 + TENSORS


def test_a_small_tensor_is_read_whole(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    header = json.dumps({"norm": {"dtype": "U8", "shape": [5], "data_offsets": [0, 5]}}).encode()
    start = len(header).to_bytes(8, "little") + header
    seen = set()
    for values in (bytes(5), *(bytes(i) + b"x" + bytes(4 - i) for i in range(5))):
        weights.write_bytes(start + values)
        seen.add(fingerprint_at_time_0(checkpoint))
    assert len(seen) == 6


def test_names_dtypes_and_the_config_count(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    seen = [fingerprint_at_time_0(checkpoint)]
    write_weights(weights, (*NAMES[:80], NAMES[80].replace("up", "in"), *NAMES[81:]))
    seen.append(fingerprint_at_time_0(checkpoint))
    weights.write_bytes(weights.read_bytes().replace(b'"U8"', b'"I8"'))
    seen.append(fingerprint_at_time_0(checkpoint))
    (checkpoint / "config.json").write_text("{ }")
    seen.append(fingerprint_at_time_0(checkpoint))
    weights.rename(checkpoint / "model-00001-of-00001.safetensors")
    seen.append(fingerprint_at_time_0(checkpoint))
    assert len(set(seen)) == 5


def test_a_copy_that_keeps_the_time_of_modification_is_the_same_model(checkpoint: Path) -> None:
    elsewhere = checkpoint.parent / "elsewhere"
    shutil.copytree(checkpoint, elsewhere)
    assert fingerprint(elsewhere) == fingerprint(checkpoint)


def test_a_change_between_the_samples_is_seen_by_the_time_of_modification(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    before = fingerprint_at_time_0(checkpoint)
    write_between_samples(weights)
    os.utime(weights, ns=(0, 1))
    assert fingerprint(checkpoint) != before


def test_a_file_of_the_hugging_face_cache_is_known_by_its_sha256(checkpoint: Path) -> None:
    """Whenever it was fetched, and also by a link to the snapshot's link."""
    one, another = snapshot_of(checkpoint, "one"), snapshot_of(checkpoint, "another")
    os.utime(another / "model.safetensors", (1, 1))
    assert fingerprint(one) == fingerprint(another)
    linked = checkpoint.parent / "linked"
    linked.mkdir()
    shutil.copy(one / "config.json", linked)
    (linked / "model.safetensors").symlink_to(one / "model.safetensors")
    assert fingerprint(linked) == fingerprint(one)


def test_a_change_between_the_samples_is_seen_by_the_sha256(checkpoint: Path) -> None:
    before = snapshot_of(checkpoint, "before")
    write_between_samples(checkpoint / "model.safetensors")
    assert fingerprint(snapshot_of(checkpoint, "after")) != fingerprint(before)


def test_a_change_in_place_is_seen_by_the_samples(checkpoint: Path) -> None:
    """The file keeps its name in the Hugging Face cache."""
    snapshot = snapshot_of(checkpoint, "one")
    before = fingerprint(snapshot)
    weights = snapshot / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert fingerprint(snapshot) != before


def test_a_file_of_the_cache_that_is_named_by_another_digest_counts_as_any_other(
    checkpoint: Path,
) -> None:
    snapshot = snapshot_of(checkpoint, "one", digits=40)
    before = fingerprint(snapshot)
    os.utime(snapshot / "model.safetensors", (1, 1))
    assert fingerprint(snapshot) != before


@pytest.mark.parametrize("length", [0, 5, 1_000, -1])
def test_a_file_that_is_not_whole_is_refused_as_at_loading(checkpoint: Path, length: int) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:length])
    with pytest.raises(ModelError, match="incomplete download"):
        fingerprint(checkpoint)
