"""The embedded default: the demonstration model that `tools/train_demo_model.py` trained."""

from pathlib import Path

DEFAULT_NAME = "rootstock-demo"
DEFAULT_CHECKPOINT = Path(__file__).parents[1] / "demo_model"
