"""What a run prints and writes while it trains: the step line, logs.jsonl, rollouts.jsonl."""

import json
import math
import os
import time
from collections import defaultdict, deque
from pathlib import Path

from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback

from .arguments import GRPOArguments
from .checkpoint import write_atomically
from .control import RunControl
from .data import CountingData
from .data_checks import BackgroundDecode, good_rows

WARM_UP_STEPS = 3  # the first updates compile and capture; they are left out of the ETA

LOSS_ZERO = (
    "note: the loss is about 0 by construction, not by a fault: advantages of a group sum to 0 and "
    "the ratio of an on-policy "
    "update is 1, so only the gradient carries the signal; watch the reward and the gradient norm."
)
ZERO_VARIANCE = (
    "note: {share:.0%} of the groups have zero variance (all completions got the same reward): they "
    "teach nothing. All right "
    "means the questions are learned; all wrong means they are too hard, or the format is not met."
)


class StepLine(TrainerCallback):
    """One line an update: progress, reward, groups without variance, completions, loss, seconds."""

    def __init__(self):
        self.trainer = None  # set once the trainer exists
        self.durations: deque[float] = deque(maxlen=50)
        self.update_started = self.step_ended = None
        self.explained: set[str] = set()

    def on_train_begin(self, args, state, control, **kwargs):
        self.step_ended = time.perf_counter()

    def on_step_begin(self, args, state, control, **kwargs):
        self.update_started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        self.durations.append(now - self.step_ended)
        times = {"time/update_s": now - self.update_started, "time/step_s": now - self.step_ended}
        self.trainer.times = {name: round(seconds, 3) for name, seconds in times.items()}
        self.step_ended = now

    def on_evaluate(self, args, state, control, **kwargs):
        self.step_ended = time.perf_counter()  # validation and saving do not count as training time

    on_save = on_evaluate

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" in logs and state.is_world_process_zero:
            print(self.line(state, logs), flush=True)
            self.explain(logs)

    def line(self, state, logs: dict) -> str:
        timed = list(self.durations)[WARM_UP_STEPS if len(self.durations) > 2 * WARM_UP_STEPS else 0 :]
        remaining = (state.max_steps - state.global_step) * sum(timed) / len(timed)
        eta = f"{int(remaining // 3600):02}:{time.strftime('%M:%S', time.gmtime(remaining))}"
        width = len(str(state.max_steps))
        return (
            f"{state.global_step:>{width}}/{state.max_steps} "
            f"{state.global_step / state.max_steps:4.0%} ETA {eta}"
            f" | reward {logs['reward']:.3f} ±{logs['reward_std']:.3f}"
            f" | zero-var: right {logs['zero_variance/all_right']:4.0%} wrong "
            f"{logs['zero_variance/all_wrong']:4.0%}"
            f" | tokens {logs['completions/mean_length']:5.1f} parsed {logs['completions/parsed']:4.0%}"
            f" cut {logs['completions/truncated']:3.0%}"
            f" | clip {logs['clip_share']:.1%} grad {logs.get('grad_norm', 0):.3f}"
            f" | {logs['time/step_s']:.2f} s (rollout {logs['time/rollout_s']:.2f} update "
            f"{logs['time/update_s']:.2f})"
        )

    def explain(self, logs: dict) -> None:
        """A sentence, once, for the two things that every newcomer reports as a bug."""
        if abs(logs["loss"]) < 1e-4 and logs["zero_variance"] < 1 and "loss" not in self.explained:
            self.explained.add("loss")
            print(LOSS_ZERO, flush=True)
        if math.isnan(logs["reward"]):
            print("note: no reward could judge a completion of this rollout: it teaches nothing.", flush=True)
        if logs["zero_variance"] > 0 and "variance" not in self.explained:
            self.explained.add("variance")
            print(ZERO_VARIANCE.format(share=logs["zero_variance"]), flush=True)


class HoursPlan(TrainerCallback):
    """How the hours of --max_hours will be spent, said once the third update has shown what one takes."""

    def __init__(self):
        self.trainer = None  # set once the trainer exists
        self.updates = 0  # of this session

    def on_step_end(self, args, state, control, **kwargs):
        self.updates += 1
        if self.updates == WARM_UP_STEPS and self.trainer.run_control.limit and state.is_world_process_zero:
            step_s = self.trainer.times["time/step_s"]
            left = state.max_steps - state.global_step
            print(hours_plan(args, left, step_s, self.trainer.run_control), flush=True)


def hours_plan(args: GRPOArguments, updates: int, step_s: float, control: RunControl) -> str:
    """The sentence for `updates` that are left, of `step_s` seconds each."""
    every = {"validation": args.eval_steps, "checkpoint": args.save_steps}
    planned = {"validation": args.eval_strategy != "no", "checkpoint": args.save_strategy != "no"}
    update_s = step_s + sum(control.longest[name] / every[name] for name in every if planned[name])
    reserve = control.reserve()
    possible = int(max(0.0, control.limit - control.elapsed() - reserve) / update_s)
    made = min(updates, possible)
    validations = int(made // args.eval_steps) if planned["validation"] else 0
    validation_s = control.longest["validation"]
    end = "--max_steps" if updates <= possible else f"--max_hours, {updates - possible:,} updates early"
    return (
        f"time: {control.elapsed() / 3600:.2f} of {control.limit / 3600:.2f} h are gone. About {made:,} "
        f"more updates of {step_s:.1f} s with {validations:,} validations of {validation_s:.0f} s "
        f"take {made * update_s / 3600:.2f} h; {reserve / 60:.1f} min are kept for the last validation and "
        f"the saves. The end comes by {end}."
    )


class JsonLog(TrainerCallback):
    """OUT/logs.jsonl, one line a log call, and OUT/rollouts.jsonl, the best and worst completion of rank
    0's groups."""

    def __init__(self, folder: Path):
        self.logs, self.rollouts = folder / "logs.jsonl", folder / "rollouts.jsonl"
        self.waiting: dict[Path, list[str]] = defaultdict(list)
        self.trainer = None  # set once the trainer exists

    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        for path in (self.logs, self.rollouts):
            if state.global_step:
                keep_until(path, state.global_step)
            else:
                set_aside(path)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero:
            return
        self.write(self.logs, [{"step": state.global_step, **logs}])

    def on_step_end(self, args, state, control, **kwargs):
        """What is summed up for a log line is in no checkpoint: each one follows a line."""
        control.should_log |= control.should_save

    def on_step_begin(self, args, state, control, **kwargs):
        """Before the update, so that the samples are there when the update fails."""
        samples = self.trainer.samples
        if state.is_world_process_zero:
            self.write(self.rollouts, [{"step": state.global_step + 1, **sample} for sample in samples])
        samples.clear()

    def write(self, path: Path, rows: list[dict]) -> None:
        """Lines that find no room on the disk wait for it: a full disk does not end a run."""
        waiting = self.waiting[path]
        waited = bool(waiting)
        waiting += [json.dumps(_plain(row), ensure_ascii=False, default=float) + "\n" for row in rows]
        try:
            append_lines(path, waiting)
            waiting.clear()
        except OSError as error:
            if not waited:
                print(f"{path} cannot be written ({error.strerror}): its lines wait for room.", flush=True)


class TensorBoard(TensorBoardCallback):
    """Transformers' own, but a full disk ends it and not the run."""

    ended = False

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.unless_ended(super().on_log, args, state, control, logs=logs, **kwargs)

    def on_train_end(self, args, state, control, **kwargs):
        self.unless_ended(super().on_train_end, args, state, control, **kwargs)

    def unless_ended(self, event, *args, **kwargs) -> None:
        try:
            if not self.ended:
                event(*args, **kwargs)
        except OSError as error:  # its writer is a thread, and does not come back
            self.ended = True
            print(f"TensorBoard's files cannot be written ({error.strerror}): it ends here.", flush=True)


class BadRowWatch(TrainerCallback):
    """Stops the run when the check that decodes all images in the background finds one that cannot be
    decoded."""

    def __init__(self, data: CountingData, check: BackgroundDecode, folder: Path):
        self.data, self.check, self.folder = data, check, folder

    def on_step_end(self, args, state, control, **kwargs):
        good_rows(self.data, self.check.poll(), skip_bad_rows=False, out=self.folder)

    def on_train_end(self, args, state, control, **kwargs):
        self.check.close()


def append_lines(path: Path, lines: list[str]) -> None:
    """All of the lines, or none where that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    end = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(lines)
    except OSError:
        if path.exists():
            os.truncate(path, end)
        raise


def _plain(value):
    """NaN and infinity, which JSON does not have, become null."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def keep_until(path: Path, step: int) -> None:
    """Cuts what an interrupted run wrote after the checkpoint it resumes from: those updates are done
    again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().split(b"\n"):  # a text has other ends of lines, which a model may write
        try:
            later = json.loads(line)["step"] > step
        except ValueError:
            break  # the line that a kill or a full disk cut short is the last one
        if not later:
            kept.append(line + b"\n")
    write_atomically(path, b"".join(kept))


def set_aside(path: Path) -> None:
    """A new run in an old folder starts new files; the old ones stay under the next free number."""
    if path.exists():
        number = next(n for n in range(1, 10_000) if not path.with_suffix(f".{n}.jsonl").exists())
        path.rename(path.with_suffix(f".{number}.jsonl"))
