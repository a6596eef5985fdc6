"""The files that `make reference` writes from the code are up to date."""

from pathlib import Path

import pytest
import yaml
from pydantic import ByteSize

from server.settings import Settings
from server.terminal.flags import value_text
from tools.reference import reference


@pytest.mark.parametrize("path", reference(), ids=lambda path: path.name)
def test_the_file_is_what_make_reference_writes(path: Path) -> None:
    assert path.read_text("utf-8") == reference()[path]


@pytest.mark.parametrize("name", sorted(Settings.model_fields))
def test_a_default_reads_back_as_itself(name: str) -> None:
    default = Settings.model_fields[name].default
    read = yaml.safe_load(value_text(default))
    assert getattr(Settings(**{name: read}), name) == default


@pytest.mark.parametrize(
    ("n_bytes", "text"), [(0, "0"), (7, "7"), (1024, "1KiB"), (3 * 2**29, "1536MiB")]
)
def test_bytes_are_written_without_loss(n_bytes: int, text: str) -> None:
    assert value_text(ByteSize(n_bytes)) == text
