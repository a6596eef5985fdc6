"""The format of the log."""

import logging

from engine.values.settings import LOG_FORMAT


def configure_logging(level: str) -> None:
    """Send everything to standard error; uvicorn and HTTP clients speak up only on trouble."""
    logging.basicConfig(level=level.upper(), format=LOG_FORMAT)
    for noisy in ("uvicorn", "httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
