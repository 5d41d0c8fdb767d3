"""No network, unless a hub name is given on the command line: that name is looked up, and nothing else."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
FORBIDDEN = any(os.environ.get(name, "0").upper() in ("1", "ON", "YES", "TRUE") for name in OFFLINE)


def stay_offline() -> None:
    """Before any Hugging Face library is imported. The user's HF_HUB_OFFLINE=0 leaves them online."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


@contextmanager
def hub_lookup() -> Iterator[None]:
    """For the name of a model or data set that the user gave; HF_HUB_OFFLINE=1 of the user's forbids it."""
    import datasets.config
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    if not FORBIDDEN:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = False
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
