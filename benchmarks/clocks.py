"""Clocks and memory of a running trainer, whichever it is."""

import resource
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

GIB = 2**30


def now() -> float:
    """Seconds, once the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def memory_gib() -> dict[str, float]:
    """What is held now: of the GPU, or else of this process."""
    if torch.cuda.is_available():
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        return {"allocated": allocated / GIB, "reserved": reserved / GIB}
    with open("/proc/self/statm") as file:
        return {"resident": int(file.read().split()[1]) * resource.getpagesize() / GIB}


def peak_memory_gib() -> dict[str, float]:
    """The most that was held: on a GPU since reset_peak_memory_stats, else since this process began."""
    if torch.cuda.is_available():
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return {"allocated": allocated / GIB, "reserved": reserved / GIB}
    return {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}


class UpdateClock(TrainerCallback):
    """Seconds of each update, from the end of one optimizer step to the end of the next: rollout, rewards,
    forward, backward, step and logging; and those of the processor, which other processes do not stretch.
    `at` maps a number of finished updates to what happens then."""

    def __init__(self, at: dict[int, Callable[[], None]]):
        self.at, self.updates, self.processor = at, [], []

    def on_train_begin(self, args, state, control, **kwargs):
        self.last, self.last_processor = now(), time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        self.updates.append(now() - self.last)
        self.processor.append(time.process_time() - self.last_processor)
        if len(self.updates) in self.at:
            self.at[len(self.updates)]()
        self.last, self.last_processor = now(), time.process_time()


class PartsClock:
    """Seconds in chosen methods. Each waits for the GPU before and after, which the headline must not:
    nothing is wrapped before start(). A part's seconds are without those of parts inside it."""

    def __init__(self):
        self.seconds: dict[str, float] = defaultdict(float)
        self.inside = 0.0  # seconds of parts within the one that runs

    def time(self, owner: Any, method: str, part: str) -> None:
        original = getattr(owner, method)

        def timed(*args, **kwargs):
            started, outer, self.inside = now(), self.inside, 0.0
            try:
                return original(*args, **kwargs)
            finally:
                took = now() - started
                self.seconds[part] += took - self.inside
                self.inside = outer + took

        setattr(owner, method, timed)
