"""A time limit on code that somebody else wrote."""

import faulthandler
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

AGAIN = 1.0  # seconds until the next alarm, when a bare `except:` has swallowed one
SPARE = 5.0  # seconds for that


class TimeIsUp(BaseException):
    """No Exception: the `except Exception` of a function that hangs must not catch it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeIsUp in the block when it takes longer.

    An alarm interrupts Python code, sleeping, waiting for a lock, a process or the network. Code in C that
    looks at no signals cannot be interrupted: after twice the time (and SPARE) the process ends, and says
    where it was. Signals reach the main thread only; in another one there is no limit. Other signals'
    handlers stay as they are, and an alarm that was set before goes off when it is due.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_alarm(number, frame):
        raise TimeIsUp

    def disarm() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, handler)

    started = time.monotonic()
    handler = signal.signal(signal.SIGALRM, on_alarm)
    faulthandler.dump_traceback_later(2 * seconds + SPARE, exit=True, file=sys.__stderr__)
    due, interval = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        yield
    finally:
        try:
            disarm()
        except TimeIsUp:  # the alarm went off in between; the next is a second away
            disarm()
            raise
        finally:
            if due:
                left = max(due - (time.monotonic() - started), 1e-3)
                signal.setitimer(signal.ITIMER_REAL, left, interval)
