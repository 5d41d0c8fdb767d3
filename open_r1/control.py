"""When a run stops before its last update, and that all ranks do so together.

A signal, the deadline, lost patience and a collapse are noticed locally; `agree` makes them known to all
ranks, which then raise StopRun at the same place: after a rollout, or before a row. The trainer catches it
and saves.
"""

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from .arguments import GRPOArguments
from .failed_peers import end_with_failed_peers
from .memory import flags_of, smaller_rows
from .status import AGAIN, NO_MEMORY, OUT_OF_MEMORY, write_status

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# A terminal's Ctrl-C reaches the whole process group, and a launcher passes it on once more: one signal.
SAME_SIGNAL_S = 2.0
MARGIN = 0.01  # of the hours: for what was not measured, as the end of the processes
DISK_BYTES_PER_S = 2e8  # of a save that was not measured yet
CHECKPOINT_BYTES, SUBMISSION_BYTES = 18, 4  # a parameter: masters, two moments, bf16; written and verified
PR_SET_PDEATHSIG = 1


class StopRun(Exception):
    """The run ends here, on all ranks. `code` is its exit code: 0 where that is a normal end."""

    def __init__(self, cause: str, message: str, code: int = 0):
        super().__init__(message)
        self.cause, self.code = cause, code


def wants_memory(error: Exception) -> bool:
    """Whether a GPU had no memory left: for PyTorch, or, where that has reserved all, for what allocates
    beside it (Triton, NCCL, cuBLAS, CUDA's graphs)."""
    said = str(error)
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in said or "ALLOC_FAILED" in said


class RunControl:
    """Signals, the deadline and patience of one run. `clock` gives seconds; `started` is when the process
    began."""

    def __init__(self, clock=time.time, started: float | None = None):
        self.clock = clock
        self.started = psutil.Process().create_time() if started is None else started
        self.signal: signal.Signals | None = None
        self.began = False  # from then on there is something to save
        self.limit: float | None = None  # seconds of the run, from `started` on
        self.before = 0.0  # seconds of earlier sessions of this run
        self.late = False
        self.patience: int | None = None
        self.stale = 0  # validations in a row without a better score
        self.collapse: str | None = None  # the sign of one, where it is to end the run
        self.longest_step = 0.0  # seconds of a rollout and its updates
        # Seconds of a validation, a checkpoint and a submission: the longest seen, or a guess.
        self.longest = dict.fromkeys(("validation", "checkpoint", "submission"), 0.0)
        self.measured: set[str] = set()
        self.apart = 0.0  # seconds in these, which are no part of a step
        self.group = self.status_file = None
        self.rank = 0

    # --- signals ------------------------------------------------------------------------------------------

    def handle_signals(self) -> None:
        """The first signal stops the run in order, the second one at once."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        if "TORCHELASTIC_RUN_ID" in os.environ:  # a launcher that is killed must not leave its ranks behind
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    def _on_signal(self, number: int, frame) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self.signalled_at = signal.Signals(number), now
        if not self.began or now - self.signalled_at > SAME_SIGNAL_S:  # nothing to save yet, or the second
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def signalled(self) -> bool:
        return self.signal is not None

    # --- the run ------------------------------------------------------------------------------------------

    def begin(self, args: GRPOArguments, parameters: int) -> None:
        """Once all checks are passed; `parameters` are the model's. Every rank calls it."""
        self.began, self.rank, self.patience = True, args.process_index, args.patience
        self.began_at = time.time()
        self.limit = args.max_hours * 3600 if args.max_hours else None
        self.cumulative = args.max_hours_cumulative
        if args.save_strategy != "no":
            self.longest["checkpoint"] = CHECKPOINT_BYTES * parameters / DISK_BYTES_PER_S
        self.longest["submission"] = SUBMISSION_BYTES * parameters / DISK_BYTES_PER_S
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.group = dist.new_group(backend="gloo")  # of CPU tensors: it never waits for a GPU
        out = Path(args.output_dir)
        out.mkdir(parents=True, exist_ok=True)
        self.failure_file = out / f"status-rank{self.rank}.json"
        self.failure_file.unlink(missing_ok=True)
        if self.group is not None:
            end_with_failed_peers(self.peer_failed)
        if self.rank == 0:
            self.status_file = out / "status.json"
            self.report("running", "The run goes on.", None)

    def peer_failed(self) -> bool:
        """Whether another rank has written down that it failed, in this run."""
        files = set(self.failure_file.parent.glob("status-rank*.json")) - {self.failure_file}
        return any(file.stat().st_mtime > self.began_at for file in files)

    def report(self, cause: str, message: str, code: int | None) -> None:
        """Rank 0 writes OUT/status.json."""
        if self.status_file:
            write_status(self.status_file, cause, message, code)

    def end(self, cause: str, message: str, code: int) -> str:
        """The run's last line, written down."""
        self.report(cause, message, code)
        return message

    def report_failure(self, error: BaseException, code: int) -> None:
        """Any rank, for a failure of its own: OUT/status-rankN.json."""
        if self.began:
            message = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            write_status(self.failure_file, "failed", message, code, rank=self.rank)

    def report_no_memory(self, error: BaseException, args: GRPOArguments) -> str:
        """As report_failure, and in OUT/status.json too, since rank 0 may wait in a collective for this rank;
        with the flags that train.sh starts it again with. Returns the message."""
        self.report_failure(error, NO_MEMORY)
        ways = [flags_of(change) for change in smaller_rows(args)]
        if self.limit and not self.cumulative:
            left = (self.limit - self.elapsed()) / 3600
            ways = [[*way, "--max_hours", f"{left:.3f}"] for way in ways] if left > 0 else []
        reason = str(error).partition("\n")[0].rstrip(".")
        message = f"Rank {self.rank} had no memory left: {reason}. "
        message += f"Set {' '.join(ways[0])}." if ways else "No flag makes the rows smaller."
        if self.began:
            status = self.failure_file.with_name("status.json")
            write_status(status, OUT_OF_MEMORY, f"{message} {AGAIN}", NO_MEMORY, rank=self.rank, smaller=ways)
        return message

    # --- time ---------------------------------------------------------------------------------------------

    def elapsed(self) -> float:
        """Seconds of the run so far."""
        return self.before + self.clock() - self.started

    def reserve(self) -> float:
        """Seconds that the end takes: the last validation, its submission, a checkpoint, a margin."""
        return sum(self.longest.values()) + MARGIN * (self.limit or 0)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measures a "validation", a "checkpoint" or a "submission"; the longest one counts."""
        start = self.clock()
        yield
        self.took(name, self.clock() - start)

    def took(self, name: str, seconds: float) -> None:
        self.apart += seconds
        self.longest[name] = max(seconds, self.longest[name] if name in self.measured else 0.0)
        self.measured.add(name)

    @contextmanager
    def step_timed(self) -> Iterator[None]:
        """Measures a rollout and its updates, without the validations and saves in between."""
        start, apart = self.clock(), self.apart
        yield
        self.longest_step = max(self.longest_step, self.clock() - start - (self.apart - apart))

    def interrupted(self) -> bool:
        """Whether a rollout should be given up; local and cheap. All ranks must `agree` right after it."""
        self.late |= self.limit is not None and self.elapsed() + self.reserve() > self.limit
        return self.late or self.signal is not None

    # --- together -----------------------------------------------------------------------------------------

    def agree(self, ahead: float = 0.0) -> None:
        """Raises StopRun on all ranks when one of them has a reason to stop, or would have one in `ahead`
        seconds of its clock. Every rank calls it at the same places."""
        self.late |= self.limit is not None and self.elapsed() + self.reserve() + ahead > self.limit
        impatient = self.patience is not None and self.stale >= self.patience
        reasons = self.signal or 0, self.late, impatient, self.collapse is not None
        number, late, impatient, collapsed = self.highest([int(reason) for reason in reasons])
        self._stop_by_signal(number)
        if late:
            self.limit, self.late = None, False  # the last validation is not to be interrupted by it
            raise StopRun("deadline", "Stopped by --max_hours, in time for the last validation and save.")
        if impatient:
            self.patience = None
            what = "1 validation was" if self.stale == 1 else f"{self.stale} validations were"
            raise StopRun("patience", f"Stopped by --patience: {what} no better.")
        if collapsed:
            raise StopRun("collapse", f"Stopped by --collapse_watch: {self.collapse}.")

    def agree_on_signal(self) -> None:
        """As `agree`, for a validation: the deadline leaves time for one."""
        self._stop_by_signal(*self.highest([int(self.signal or 0)]))

    def _stop_by_signal(self, number: int) -> None:
        if number:
            self.signal = signal.Signals(number)
            raise StopRun("signal", f"Stopped by {self.signal.name}.", 128 + number)

    def highest(self, values: list[int]) -> list[int]:
        """The highest of all ranks, element by element."""
        if self.group is None:
            return values
        found = torch.tensor(values)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return found.tolist()

    def collect(self, value: list) -> list:
        """The elements of all ranks' lists."""
        if self.group is None:
            return value
        lists = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(lists, value, group=self.group)
        return [element for one in lists for element in one]

    # --- checkpoints --------------------------------------------------------------------------------------

    def state(self) -> dict:
        """For a checkpoint's marker."""
        return {"elapsed_s": round(self.elapsed(), 1), "stale_validations": self.stale}

    def restore(self, info: dict) -> None:
        self.before = info["elapsed_s"] if self.cumulative else 0.0
        self.stale = info["stale_validations"]
