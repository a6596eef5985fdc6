"""The backend's pure parts: batching, context length, where checkpoints are, MLX's environment."""

import io
import math
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import numpy as np
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError

from engine.api import ModelError
from engine.mlx_backend.backend import load_backend
from engine.mlx_backend.environment import (
    MAX_ELEMENTS,
    MAX_OPERATIONS,
    limit_by_operations,
    mlx_imports,
)
from engine.mlx_backend.host import device_memory_bytes
from engine.mlx_backend.loading.checkpoint import max_context_tokens
from engine.mlx_backend.loading.locate import fetch_checkpoint, find_checkpoint
from engine.mlx_backend.model.attention import gathered_padding_keys
from engine.mlx_backend.model.batching import ForwardCost, group_by_length, padded
from engine.mlx_backend.model.rows import TokenSpan
from engine.values.settings import EngineConfig


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [
        ([], []),
        ([5], [[0]]),
        ([100, 100, 100], [[0, 1, 2]]),
        ([10, 500, 12, 490], [[1, 3], [0, 2]]),
        ([30, 20, 10], [[0, 1], [2]]),
    ],
)
def test_chunks_of_like_length_run_together(lengths: list[int], groups: list[list[int]]) -> None:
    assert group_by_length(lengths, 16) == groups


def test_chunks_whose_padding_adds_up_run_apart() -> None:
    """Fifteen rows padded by 4 tokens each outweigh a forward of 16."""
    assert group_by_length([24, *[20] * 15], 16) == [[0, 1, 2, 3, 4], [*range(5, 16)]]


def decodes(*stops: int) -> list[TokenSpan]:
    blocks = np.zeros(0, dtype=np.uint32)
    return [TokenSpan(stop - 1, 1, blocks, index=index) for index, stop in enumerate(stops)]


def test_decodes_run_apart_where_padding_costs_more_than_a_forward() -> None:
    short_and_long = decodes(*[300] * 8, 30_000, *[300] * 7)
    cost = ForwardCost(tokens=16, keys=6_000)
    groups = padded(short_and_long, cost)
    assert [[span.index for span in group] for group in groups] == [
        [8],
        [*range(8), *range(9, 16)],
    ]
    [group] = padded(decodes(900, 300, 700, 100), cost)
    assert [span.index for span in group] == [0, 1, 2, 3], "in the order of tables"


def test_what_a_forward_costs_in_keys_follows_the_model_s_size() -> None:
    assert gathered_padding_keys(weight_bytes=108_000_000, token_bytes=16_384) == pytest.approx(
        1648, 0.01
    )
    assert gathered_padding_keys(108_000_000, token_bytes=0) == math.inf


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"text_config": {"max_position_embeddings": 1024}}, 1024),
        ({"text_config": None}, None),
        ({}, None),
        ({"text_config": None, "n_positions": 512}, 512),
        ({"text_config": "none"}, None),
        ({"text_config": [1]}, None),
        ({"llm_config": {"max_position_embeddings": 131072}}, 131072),
        ({"language_config": {"max_position_embeddings": 131072}}, 131072),
        ({"max_position_embeddings": 1e6}, 1_000_000),
        ({"max_position_embeddings": "32768"}, 32768),
        ({"text_config": {"max_position_embeddings": "1e6"}}, 1_000_000),
        ({"max_position_embeddings": True}, None),
        ({"max_position_embeddings": -1, "n_positions": 64}, 64),
        ({"max_position_embeddings": "long", "n_positions": 64}, 64),
        ({"model_max_length": int(1e30)}, None),
        ({"max_position_embeddings": float("inf"), "seq_length": float("nan")}, None),
        ({"n_positions": 512}, 512),
        ({"max_seq_len": 32768}, 32768),
        ({"max_context_length": 2048}, 2048),
        ({"model_max_length": 1 << 20}, 1 << 20),
        ({"max_position_embeddings": 8192, "model_max_length": 131072}, 8192),
        ({"max_position_embeddings": None}, None),
    ],
)
def test_context_length(config: dict[str, object], tokens: int | None) -> None:
    assert max_context_tokens(config) == tokens


def test_gpu_memory_under_either_name() -> None:
    assert device_memory_bytes({"max_recommended_working_set_size": 7, "memory_size": 9}) == 7
    assert device_memory_bytes({"total_memory": 8}) == 8


def test_a_model_is_a_directory_or_a_repository(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="is a file"):
        find_checkpoint(str(tmp_path / "config.json"), download=False)
    with pytest.raises(ModelError, match="neither a directory nor a repository"):
        find_checkpoint("not//a repository", download=False)
    with pytest.raises(ModelError, match=r"one of Ollama's, .* `rootstock pull mlx-community/"):
        find_checkpoint("qwen3:4b", download=False)


def test_a_path_that_is_misspelt_is_said_to_be_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "engine.mlx_backend.loading.locate.snapshot_download", Mock(side_effect=unreachable())
    )
    for name in ("tiny", "thin"):
        (tmp_path / "models" / name).mkdir()
        (tmp_path / "models" / name / "config.json").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (snapshot := tmp_path / "hub/models--org--llama/snapshots/1").mkdir(parents=True)
    (snapshot / "config.json").touch()
    nowhere = (
        f"there is no directory {tmp_path / 'models' / 'small'}, the Hugging Face cache does not "
        "have it, and huggingface.co cannot be reached (No route to host)"
    )
    with pytest.raises(ModelError) as refused:
        find_checkpoint("models/small", download=True)
    assert str(refused.value) == f"{nowhere}; at hand: models/thin, models/tiny, org/llama"
    with pytest.raises(ModelError, match=r"; did you mean models/tiny\?$"):
        find_checkpoint("models/tinny", download=True)
    with pytest.raises(ModelError, match=r"/tinny; did you mean models/tiny\?$"):
        find_checkpoint("./models/tinny", download=True)
    with pytest.raises(ModelError, match=r"; did you mean one of those in it: thin, tiny\?$"):
        find_checkpoint("models", download=True)
    with pytest.raises(ModelError, match=r"fetches it; did you mean org/llama\?$"):
        find_checkpoint("org/lama", download=False)


@pytest.mark.parametrize("start", ["/no/such", "./no-such", "../no-such", ".", "~/no-such"])
def test_what_begins_as_a_path_is_no_repository(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "engine.mlx_backend.loading.locate.snapshot_download", Mock(side_effect=AssertionError)
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    model = f"{start}/model"
    found = Path(model.replace("~", str(tmp_path), 1)).resolve()
    with pytest.raises(ModelError, match=f"^there is no directory {re.escape(str(found))}$"):
        find_checkpoint(model, download=True)


def test_a_home_that_is_not_known_is_said() -> None:
    with pytest.raises(ModelError, match=r"^it cannot be looked for: "):
        find_checkpoint("~nobody-here/model", download=True)


def test_a_model_that_was_not_fetched_is_said_with_what_fetches_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="; `rootstock pull org/name` fetches it"):
        find_checkpoint("org/name", download=False)


def test_a_path_to_nothing_is_known_before_mlx_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "engine.mlx_backend.environment.load_blas", Mock(side_effect=AssertionError)
    )
    with pytest.raises(ModelError, match="there is no directory /no/such"):
        load_backend(EngineConfig(model="/no/such"), lambda line: None)


def gated() -> GatedRepoError:
    answer: Any = httpx.Response(401, request=httpx.Request("GET", "https://hub.example"))
    return GatedRepoError("401 Client Error.\n\nCannot access gated repo", response=answer)


def unreachable() -> LocalEntryNotFoundError:
    """As the hub's client raises it: with advice of many words, and the reason behind."""
    error = LocalEntryNotFoundError("Got: ConnectError\nPlease check your internet connection")
    error.__cause__ = OSError("No route to\nhost")
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (gated(), r"^it is gated: HF_TOKEN .* \(401 .* Cannot access gated repo\)"),
        (
            unreachable(),
            r"^there is no .*/some/model, .* huggingface\.co cannot be reached \(No route to host",
        ),
        (
            ValueError("Unknown scheme for proxy"),
            r"^huggingface\.co does not answer as it should: Unknown scheme",
        ),
    ],
)
def test_what_the_hub_refuses_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    monkeypatch.setattr(
        "engine.mlx_backend.loading.locate.snapshot_download", Mock(side_effect=error)
    )
    with pytest.raises(ModelError, match=said) as refused:
        find_checkpoint("some/model", download=True)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("disabled", [True, False])
def test_who_asks_hears_how_much_has_been_fetched(
    disabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there is no terminal, and so no bar."""

    def fetch(model: str, *, tqdm_class: Any, **options: Any) -> str:
        name = "huggingface_hub.snapshot_download"
        shown = {"total": 0, "file": io.StringIO(), "disable": disabled}
        written = tqdm_class(name=name, **shown)
        written.total = 1000
        tqdm_class(name=f"{name}.transfer", **shown).update(7)
        tqdm_class(desc="Fetching 2 files", **shown).update(1)
        written.update(400)
        written.update(600)
        raise OSError("the line is dead")

    monkeypatch.setattr("engine.mlx_backend.loading.locate.snapshot_download", fetch)
    heard: list[tuple[int, int]] = []
    with pytest.raises(ModelError, match="the line is dead"):
        fetch_checkpoint("some/model", lambda *said: heard.append(said))
    assert heard == [(400, 1000), (1000, 1000)]


def test_the_limit_of_open_files_stays_as_it_is() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with mlx_imports():
        resource.setrlimit(resource.RLIMIT_NOFILE, (16, before[1]))
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


@pytest.mark.parametrize(
    ("on_cuda", "advice"),
    [(True, "in a clone: make serve BACKEND=cpu"), (False, "-m pip install 'mlx[cpu]'")],
)
def test_mlx_that_does_not_start_is_one_line(
    on_cuda: bool, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.mlx_backend.environment.has_cuda_package", lambda: on_cuda)
    monkeypatch.setitem(sys.modules, "mlx.core", None)  # as where its library cannot be loaded
    with (
        pytest.raises(ModelError, match=r"^MLX (for CUDA )?does not start") as caught,
        mlx_imports(),
    ):
        pytest.fail("MLX has been imported")
    assert advice in str(caught.value)
    assert "\n" not in str(caught.value)


ROOT = Path(__file__).parents[2]
INT_BITS = 32
LARGEST_MEMORY_BYTES = 1 << 42
"""4 TiB: more than any machine gives a GPU of Metal or CUDA."""


@pytest.fixture(params=["Metal", "CUDA"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A machine with this GPU, as far as is known before MLX is imported."""
    device: str = request.param
    monkeypatch.setattr(sys, "platform", "darwin" if device == "Metal" else "linux")
    monkeypatch.setattr("engine.mlx_backend.environment.has_cuda_package", lambda: device == "CUDA")
    return device


@pytest.mark.usefixtures("gpu")
def test_on_a_gpu_no_elements_end_a_command_buffer_before_its_operations_do() -> None:
    environment = dict[str, str]()
    limit_by_operations(environment)
    assert environment.keys() == {MAX_ELEMENTS}, "the limit on operations is the user's"
    limit = int(environment[MAX_ELEMENTS])
    assert limit < 2 ** (INT_BITS - 1), "MLX would read a negative number"
    # Elements of a byte each, and operations that each use all the memory there is, three times.
    assert limit > 3 * 100 * (LARGEST_MEMORY_BYTES >> 20)


@pytest.mark.usefixtures("gpu")
def test_the_users_own_limits_stay() -> None:
    environment = {MAX_ELEMENTS: "64", MAX_OPERATIONS: "7"}
    limit_by_operations(environment)
    assert environment == {MAX_ELEMENTS: "64", MAX_OPERATIONS: "7"}


def test_on_a_cpu_the_environment_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("engine.mlx_backend.environment.has_cuda_package", lambda: False)
    environment = dict[str, str]()
    limit_by_operations(environment)
    assert environment == {}


LOAD = """
import os, sys
import engine.mlx_backend.environment as module
from {module} import {function}

def end(environment):
    assert environment is os.environ
    print("mlx.core" in sys.modules)
    raise SystemExit

module.limit_by_operations = end
{call}
"""


@pytest.mark.parametrize(
    ("module", "function", "call"),
    [
        (
            "engine.mlx_backend.backend",
            "load_backend",
            "from engine.values.settings import EngineConfig\n"
            "load_backend(EngineConfig(''), print)",
        ),
        ("measuring.process", "cases_of", "cases_of(None)"),
    ],
)
def test_the_limit_is_set_before_mlx_is_imported(module: str, function: str, call: str) -> None:
    """MLX reads it once. Engines and the processes that measure are where it counts."""
    program = LOAD.format(module=module, function=function, call=call)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"
