"""Settings of all tests: one thread a process (some tests start several), and the `gpu` marker."""

import os
import signal

os.environ["OMP_NUM_THREADS"] = "1"  # before torch; child processes inherit it

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)
# `bash test.sh &` in a script starts with Ctrl-C ignored, and bash cannot trap what it inherits so.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
