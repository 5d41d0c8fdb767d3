"""Ends a rank that waits for one that has failed.

The launcher sends it SIGTERM, but Python runs a handler between two of its own instructions, and a rank that
waits for a GPU in a collective never comes to the next one. What a signal writes to a pipe is written at
once, and a thread reads it. Without it the launcher would wait for half a minute, and then kill the rank.
"""

import os
import signal
import threading
from collections.abc import Callable


def end_with_failed_peers(has_failed: Callable[[], bool]) -> None:
    """From now on a signal ends this process where `has_failed()`, one of its peers; nothing can be saved
    together then. The main thread calls it."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def watch() -> None:
        while number := os.read(read, 1):
            if has_failed():
                os._exit(128 + number[0])

    threading.Thread(target=watch, daemon=True).start()
