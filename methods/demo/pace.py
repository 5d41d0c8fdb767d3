"""How fast SFT steps are, so that it can be given as many as fit a time."""

import time

from transformers import TrainerCallback

PROBE = 40  # steps that tell the speed


class StepClock(TrainerCallback):
    """Seconds of the steps, without what comes before the first one: loading, workers, the first batch."""

    def __init__(self) -> None:
        self.times: list[float] = []  # the first step's begin, then the end of each

    def on_step_begin(self, *_, **__) -> None:
        if not self.times:
            self.times.append(time.perf_counter())

    def on_step_end(self, *_, **__) -> None:
        self.times.append(time.perf_counter())

    @property
    def total(self) -> float:
        return self.times[-1] - self.times[0]

    def steps_within(self, seconds: float) -> int:
        """As many steps, at least one, at the speed of the second half: the first steps are slower."""
        second = self.times[len(self.times) // 2 :]
        return max(1, round(seconds * (len(second) - 1) / (second[-1] - second[0])))
