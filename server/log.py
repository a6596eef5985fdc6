"""The format of the log."""

import logging

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def configure_logging(level: str) -> None:
    """Send everything to standard error; uvicorn and HTTP clients speak up only on trouble."""
    logging.basicConfig(level=level.upper(), format=FORMAT)
    for noisy in ("uvicorn", "httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
