"""What a checkpoint's files say of its model, and what is said of files that are not whole."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from engine.api import ModelError
from engine.mlx_backend.loading.checkpoint import DEFAULT_CHECKPOINT, FILES, Checkpoint, checked
from engine.mlx_backend.loading.loader import open_model
from engine.mlx_backend.loading.locate import find_checkpoint, open_checkpoint
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


def with_a_file_and_the_processors(directory: Path) -> None:
    with_a_file(directory)
    with_the_processors_template(directory)


def with_the_processors_template(directory: Path) -> None:
    content = json.dumps({"chat_template": "{{ messages[0].content }}, from the processor"})
    (directory / "chat_template.json").write_text(content, "utf-8")


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
        with_a_file_and_the_processors,
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


def test_the_template_may_be_the_processors_alone(directory: Path) -> None:
    """transformers reads chat_template.json for a processor only, and chats had no template."""
    without_a_template(directory)
    with_the_processors_template(directory)
    loaded = open_model(directory, 1 << 40)
    tokenizer = CheckpointTokenizer(loaded.tokenizer._tokenizer, TemplateKind(), 100)
    assert tokenizer.chat_template == open_checkpoint(str(directory)).chat_template
    text = tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]))
    assert text == "hi, from the processor"
    (directory / "chat_template.json").write_text("[]", "utf-8")
    with pytest.raises(ModelError, match=r"chat_template\.json is not a JSON object"):
        open_model(directory, 1 << 40)


def test_a_tokenizer_may_be_made_of_tiktoken_model(directory: Path) -> None:
    """Kimi's. mlx-lm fetches it."""
    (directory / "tokenizer.json").rename(directory / "tiktoken.model")
    assert checked(directory) == directory
    assert "tiktoken.model" in FILES


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


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        *((broken, "cannot be read") for broken in ("", "{", '{"a": "\udce9"}', "[" * 100_000)),
        ("{}", "names no model_type"),
        ('{"model_type": ["llama"]}', "names no model_type"),
        ("[1]", "is not a JSON object"),
        ("null", "is not a JSON object"),
    ],
)
def test_a_configuration_of_no_model(checkpoint: Path, text: str, problem: str) -> None:
    (checkpoint / "config.json").write_text(text, errors="surrogateescape")
    assert f"config.json {problem}" in refusal(checkpoint)


def test_what_is_missing_altogether_is_named(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    assert refusal(checkpoint).endswith("has no tokenizer: tokenizer.json is missing")
    (checkpoint / "config.json").unlink()
    assert "config.json" in refusal(checkpoint)


@pytest.mark.parametrize(
    ("text", "licence"),
    [
        ("---\nlicense: apache-2.0\n---\n# A model\n", "apache-2.0"),
        ("---\nlanguage:\n- en\nlicense: llama3.2\ntags: [x]\n---\n", "llama3.2"),
        ("---\nlanguage: en\n---\nlicense: mit\n---\n", ""),
        ("# A model\n---\nlicense: mit\n---\n", ""),
        ("---\nlicense:\n---\n", ""),
        ("", ""),
        (None, ""),
        (b"---\nlicense: \xff\n---\n", ""),
    ],
)
def test_the_licence_is_the_one_that_the_front_matter_names(
    text: str | bytes | None, licence: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "README.md").write_bytes(text.encode() if isinstance(text, str) else text)
    assert Checkpoint(tmp_path).license == licence


def test_the_embedded_model_names_its_licence() -> None:
    assert Checkpoint(DEFAULT_CHECKPOINT).license == "apache-2.0"
