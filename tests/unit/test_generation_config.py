"""What generation_config.json says of sampling, and what is done with files of any kind."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

from engine.mlx_backend.loading.purpose import sampling_defaults
from engine.values.model import SamplingDefaults

QWEN3 = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "4.51.0",
}


def read(checkpoint: Path, content: bytes | Mapping[str, object]) -> tuple[SamplingDefaults, str]:
    """The defaults, and what the log says of them."""
    written = content if isinstance(content, bytes) else json.dumps(content).encode()
    (checkpoint / "generation_config.json").write_bytes(written)
    lines: list[str] = []
    return sampling_defaults(checkpoint, lines.append), "\n".join(lines)


def test_the_file_of_a_qwen3(tmp_path: Path) -> None:
    defaults, said = read(tmp_path, QWEN3)
    assert defaults == SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20)
    assert said == (
        "sampling defaults: temperature 0.6, top_p 0.95, top_k 20, min_p 0, repetition_penalty 1"
    )


def test_without_a_file_or_a_word_about_sampling(tmp_path: Path) -> None:
    lines: list[str] = []
    assert sampling_defaults(tmp_path, lines.append) == SamplingDefaults()
    assert lines == []
    nulls = {"temperature": None, "top_k": None, "eos_token_id": 2}
    assert read(tmp_path, nulls) == (SamplingDefaults(), "")


def test_do_sample_counts_for_nothing(tmp_path: Path) -> None:
    defaults, _ = read(tmp_path, QWEN3 | {"do_sample": False, "temperature": 0.7})
    assert defaults.temperature == 0.7


def test_whole_numbers_and_limits_are_taken(tmp_path: Path) -> None:
    said = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 1, "repetition_penalty": 100}
    assert read(tmp_path, said)[0] == SamplingDefaults(0, 1, -1, 1, 100)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.5),
        ("temperature", "0.6"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 2**31),
        ("top_k", 20.5),
        ("top_k", 10**4000),
        ("min_p", [0.1]),
        ("min_p", {"a": "\n" * 10_000}),
        ("repetition_penalty", 0),
    ],
)
def test_what_no_request_could_say_is_ignored_in_one_line(
    tmp_path: Path, name: str, value: object
) -> None:
    other = "min_p" if name == "top_p" else "top_p"
    defaults, said = read(tmp_path, {other: 0.5, name: value})
    assert asdict(defaults) == asdict(SamplingDefaults()) | {other: 0.5}
    ignored, applies = said.split("\n")
    assert ignored.startswith(f"generation_config.json: {name} is ignored: Input should be ")
    assert len(ignored) < 200
    assert applies.startswith("sampling defaults: ")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"temperature": 0.6',
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n",
        b"\xff\xfe{\x00}\x00",
        b"[" * 100_000,
        b'{"top_k": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_broken_file_is_ignored_in_one_line(tmp_path: Path, content: bytes) -> None:
    defaults, said = read(tmp_path, content)
    assert defaults == SamplingDefaults()
    assert said.startswith("generation_config.json is ignored: ")
    assert "\n" not in said
