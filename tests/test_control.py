"""A run that is stopped, by a signal, the deadline or lost patience, has saved and goes on as if it had not
been."""

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from open_r1 import grpo, validation
from open_r1.callbacks import StepLine, hours_plan
from open_r1.check_args import check_args
from open_r1.complete import complete_marker
from open_r1.control import RunControl, StopRun
from open_r1.rewards import RewardCaller
from open_r1.rollout import FastEngine
from open_r1.sampling import Sampling
from open_r1.status import ending, write_status
from open_r1.submission import read_record
from open_r1.trainer import Qwen2VLGRPOTrainer
from open_r1.weights import master_weights
from tests.test_grpo import flags, folder, give_scores, lines, parse, without_times  # noqa: F401 (a fixture)


@pytest.fixture(autouse=True)
def handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(folder: Path, out: Path, *more, control: RunControl | None = None):  # noqa: F811
    parsed = parse(*flags(folder, out, *more))
    check_args(*parsed)
    control = control or RunControl(started=time.time())
    control.handle_signals()
    return grpo.run(*parsed, control)


def status(out: Path) -> dict:
    return json.loads((out / "status.json").read_text())


def at_call(monkeypatch, owner: type, method: str, number: int, do) -> list[int]:
    """Calls `do` before the call of that number; the list holds the number of calls."""
    original, calls = getattr(owner, method), [0]

    def counted(self, *args, **kwargs):
        calls[0] += 1
        if calls[0] == number:
            do(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, method, counted)
    return calls


def send(number: int):
    return lambda _: os.kill(os.getpid(), number)


# --- the clock ----------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def timed_control(folder, tmp_path, **settings) -> tuple[RunControl, Clock]:  # noqa: F811
    args = parse(*flags(folder, tmp_path, *(x for k, v in settings.items() for x in (f"--{k}", v))))[1]
    clock = Clock()
    control = RunControl(clock, started=0.0)
    control.begin(args, parameters=0)
    return control, clock


def test_the_run_ends_in_time_for_the_longest_step_a_validation_and_the_saves(folder, tmp_path):  # noqa: F811
    control, clock = timed_control(folder, tmp_path, max_hours=1)
    for seconds in (100, 300, 200):
        with control.step_timed():
            with control.timed("validation"):
                clock.now += 50
            clock.now += seconds
    with control.timed("checkpoint"):
        clock.now += 30
    assert control.longest_step == 300 and control.reserve() == 50 + 30 + 36
    clock.now = 3600 - 416
    control.agree(ahead=control.longest_step)
    assert not control.interrupted()
    clock.now += 1
    with pytest.raises(StopRun, match="--max_hours") as stop:
        control.agree(ahead=control.longest_step)
    assert (stop.value.cause, stop.value.code) == ("deadline", 0)
    clock.now = 5000  # the last validation is not interrupted by it
    assert not control.interrupted()


def test_a_step_that_takes_too_long_is_given_up(folder, tmp_path):  # noqa: F811
    control, clock = timed_control(folder, tmp_path, max_hours=1)
    clock.now = 3600 - 36
    assert not control.interrupted()
    clock.now += 1
    assert control.interrupted()
    with pytest.raises(StopRun, match="--max_hours"):
        control.agree()


def test_hours_of_earlier_sessions_count_where_asked(folder, tmp_path):  # noqa: F811
    for cumulative, elapsed in (("true", 3000), ("false", 1000)):
        control, clock = timed_control(folder, tmp_path, max_hours=1, max_hours_cumulative=cumulative)
        control.restore({"elapsed_s": 2000, "stale_validations": 0})
        clock.now = 1000
        assert control.elapsed() == elapsed


def test_how_the_hours_are_spent(folder, tmp_path):  # noqa: F811
    control, clock = timed_control(folder, tmp_path, max_hours=1, save_steps=100)
    control.took("validation", 25)
    control.took("checkpoint", 100)
    args = parse(
        *flags(folder, tmp_path), "--val_dataset", "v", "--eval_strategy", "steps", "--eval_steps", 50
    )[1]
    clock.now = 360
    # 3,600 s - 360 gone - 25 - 100 - 36 are 3,079; an update takes 8.5 + 25 / 50 + 100 / 100 = 10 s.
    said = hours_plan(args, 1000, 8.5, control)
    assert "0.10 of 1.00 h are gone. About 307 more updates of 8.5 s with 6 validations of 25 s take" in said
    assert "2.7 min are kept" in said and said.endswith("by --max_hours, 693 updates early.")
    assert hours_plan(args, 300, 8.5, control).endswith("by --max_steps.")


def test_a_deadline_of_seconds(folder, tmp_path, monkeypatch, capsys):  # noqa: F811
    """A validation that no eval_steps asked for, its submission and a checkpoint of the last update. The
    clock is the processor's: how busy the machine is does not matter."""
    give_scores(monkeypatch, 10.0, 30.0)  # base, last
    control = RunControl(time.process_time, started=time.process_time() - 100)
    with pytest.raises(StopRun, match="--max_hours") as stop:
        run(
            folder, tmp_path / "out", "--max_steps", 100_000, "--max_hours", 112 / 3600,
            "--val_dataset", folder / "val", "--eval_strategy", "steps", "--eval_steps", 50_000,
            "--submission_dir", tmp_path / "best", "--save_steps", 50_000, control=control,
        )  # fmt: skip
    assert capsys.readouterr().out.count("updates early.") == 1
    assert stop.value.code == 0 and control.elapsed() < 112 and control.limit is None
    last = lines(tmp_path / "out/logs.jsonl")[-2]["step"]
    assert last > 2 and complete_marker(tmp_path / f"out/checkpoint-{last}")["step"] == last
    assert read_record(tmp_path / "best")["step"] == last
    told = status(tmp_path / "out")
    assert (told["cause"], told["exit_code"]) == ("deadline", 0) and f"checkpoint-{last}." in told["message"]


def test_patience(folder, tmp_path, monkeypatch):  # noqa: F811
    """Validations without a better score are counted over a resume."""
    monkeypatch.setattr(RunControl, "restore", restore := _recorded(RunControl.restore))
    more = ("--val_dataset", folder / "val", "--eval_strategy", "steps", "--eval_steps", 1, "--patience", 3)
    give_scores(monkeypatch, 10.0, 30.0, 20.0, 30.0, 30.0)
    run(folder, tmp_path / "out", *more, "--max_steps", 3, "--save_steps", 1)
    with pytest.raises(StopRun, match="3 validations were no better"):
        run(folder, tmp_path / "out", *more, "--max_steps", 100, "--save_steps", 1)
    assert restore.seen[0]["stale_validations"] == 1
    assert status(tmp_path / "out")["cause"] == "patience"
    assert complete_marker(tmp_path / "out/checkpoint-5")


def test_scores_on_other_rows_are_forgotten(folder, tmp_path, monkeypatch):  # noqa: F811
    """They would be beaten by none, and look like a collapse."""
    monkeypatch.setattr(validation, "GREEDY", Sampling(greedy=True, max_new_tokens=4))
    more = ("--val_dataset", folder / "val", "--eval_strategy", "steps", "--eval_steps", 1, "--patience", 1)
    more += ("--submission_dir", tmp_path / "submission", "--save_steps", 1)
    give_scores(monkeypatch, 10.0, 90.0, 10.0, 20.0, 25.0, 30.0)  # base and update; base, submission, updates
    run(folder, tmp_path / "out", *more, "--max_steps", 1)
    changed = ("--max_steps", 3, "--eval_limit", 2, "--accept_changes", "true")
    trainer = run(folder, tmp_path / "out", *more, *changed)
    assert (trainer.best_score, trainer.keep_best.best_score, trainer.run_control.stale) == (30.0, 30.0, 0)
    assert [step for step, *_ in trainer.collapse_watch.scores] == [0, 2, 3]
    assert not trainer.validate_again
    assert complete_marker(tmp_path / "out/checkpoint-3")["chosen_score"] == 30.0


def _recorded(method):
    def call(self, info):
        call.seen.append(info)
        return method(self, info)

    call.seen = []
    return call


# --- signals ------------------------------------------------------------------------------------------------


def fail_in_each_rollout(patch: pytest.MonkeyPatch) -> None:
    """As if a reward had failed: it is counted once a rollout, however often that is made."""
    settle = RewardCaller.settle

    def counted(self, *args):
        self.failures["accuracy"] += 1
        return settle(self, *args)

    patch.setattr(RewardCaller, "settle", counted)


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):  # noqa: F811
    out = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        fail_in_each_rollout(patch)
        return out, run(folder, out, *STOPPED)


STOPPED = ("--steps_per_generation", 4, "--gradient_accumulation_steps", 2, "--max_steps", 6)
STOPPED += ("--save_steps", 100)
PLACES = {
    # where: (class, method, call, step of the checkpoint); two updates a rollout, two rows an update
    "in the first rollout": (FastEngine, "_step", 3, 0),
    "in a rollout": (FastEngine, "_step", 17, 4),
    "between rollout and update": (Qwen2VLGRPOTrainer, "add_logps", 2, 2),
    "between rows": (Qwen2VLGRPOTrainer, "compute_loss", 5, 2),
    "in the second update of a rollout": (Qwen2VLGRPOTrainer, "compute_loss", 7, 4),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_run_stopped_by_a_signal_goes_on_bit_for_bit(place, whole, folder, tmp_path, monkeypatch):  # noqa: F811
    owner, method, call, saved = PLACES[place]
    fail_in_each_rollout(monkeypatch)
    with monkeypatch.context() as patch:
        calls = at_call(patch, owner, method, call, send(signal.SIGUSR1))
        with pytest.raises(StopRun, match="SIGUSR1") as stop:
            run(folder, tmp_path, *STOPPED)
    assert calls[0] == call + ("second" in place)  # nothing is done in vain
    assert stop.value.code == 138 and status(tmp_path)["exit_code"] == 138
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ([f"checkpoint-{saved}"] if saved else [])
    trainer = run(folder, tmp_path, *STOPPED)
    assert status(tmp_path)["cause"] == "finished"
    out, uninterrupted = whole
    assert without_times(lines(tmp_path / "logs.jsonl")) == without_times(lines(out / "logs.jsonl"))
    assert lines(tmp_path / "rollouts.jsonl") == lines(out / "rollouts.jsonl")
    pairs = zip(master_weights(trainer.model), master_weights(uninterrupted.model), strict=True)
    assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)


@pytest.mark.parametrize("steps, every", [(4, 2), (2, 5)])
def test_a_validation_that_was_stopped_is_made_after_the_resume(folder, tmp_path, monkeypatch, steps, every):  # noqa: F811
    """In the middle of a run, and after its last update, which is always validated."""
    more = ("--val_dataset", folder / "val", "--eval_strategy", "steps", "--eval_steps", every)
    more += ("--max_steps", steps, "--save_steps", 100)
    with monkeypatch.context() as patch:
        original = validation.evaluate
        patch.setattr(validation, "evaluate", lambda *a, **k: (send(signal.SIGTERM)(0), original(*a, **k))[1])
        with pytest.raises(StopRun, match="SIGTERM"):
            run(folder, tmp_path, *more)
    assert complete_marker(tmp_path / "checkpoint-2")
    assert not [log for log in lines(tmp_path / "logs.jsonl") if "eval_score" in log]
    run(folder, tmp_path, *more)
    logs = lines(tmp_path / "logs.jsonl")
    assert [log["step"] for log in logs if "eval_score" in log] == [2, 4][: steps // 2]


def test_validations_are_due_where_they_are_planned():
    args = SimpleNamespace(eval_strategy="steps", eval_steps=5, eval_delay=10, max_steps=22)
    trainer = SimpleNamespace(args=args, state=SimpleNamespace(global_step=0), validated_at=0)
    trainer.validate_again = False
    due = [
        step for step in range(24)
        if Qwen2VLGRPOTrainer.validation_is_due(trainer, {"step": step, "validated_at": 0})
    ]  # fmt: skip
    assert due == [10, 15, 20, 22]


def test_the_line_of_an_update_counts_hours_beyond_a_day():
    watch, names = StepLine(), [
        "reward", "reward_std", "clip_share", "zero_variance/all_right", "zero_variance/all_wrong",
        "completions/mean_length", "completions/parsed", "completions/truncated", "time/step_s",
        "time/rollout_s", "time/update_s",
    ]  # fmt: skip
    watch.durations.append(100.0)
    line = watch.line(SimpleNamespace(global_step=1, max_steps=1101), dict.fromkeys(names, 0.0))
    assert "ETA 30:33:20 " in line  # 110,000 s


# --- what train.sh makes of it ------------------------------------------------------------------------------


def test_the_exit_code_and_the_last_line(tmp_path):
    """One line for each way that a run can end, whatever the launcher returned."""
    assert ending(tmp_path, 0, 0) == ("", 0)
    assert ending(tmp_path, 0, 1) == ("The run ended before its first update; the reason stands above.", 1)
    early = "Stopped by SIGINT before the run began: nothing was written."
    assert ending(tmp_path, 0, 130) == (early, 130)
    write_status(tmp_path / "status.json", "running", "", None)
    assert ending(tmp_path, 0, 1)[1] == 67  # killed
    line, code = ending(tmp_path, 0, 143)  # the second signal
    assert code == 143 and line.startswith("Stopped by SIGTERM, at once. The same command")
    peer = "RuntimeError: Connection closed by peer"
    write_status(tmp_path / "status-rank0.json", "failed", peer, 1, rank=0)
    assert ending(tmp_path, 0, 1)[1] == 67  # by what happened to another
    write_status(tmp_path / "status-rank1.json", "failed", "RewardError: it is broken.", 66, rank=1)
    line, code = ending(tmp_path, 0, 1)
    assert code == 66 and line.startswith("Rank 1 failed: RewardError: it is broken. The same command")
    write_status(tmp_path / "status.json", "signal", "Stopped by SIGTERM.", 143)
    assert ending(tmp_path, 0, 1) == ("Stopped by SIGTERM.", 143)
    assert ending(tmp_path, time.time() + 1, 1)[1] == 1  # of an earlier run


def test_two_ranks_that_fail_at_once_leave_one_whole_status(tmp_path, monkeypatch, capsys):
    """Rank 1 writes the file while rank 0 is about to bring its own into place."""
    path, replace = tmp_path / "status.json", os.replace

    def late(*names):
        monkeypatch.setattr(os, "replace", replace)
        write_status(path, "out_of_memory", "longer than the other one", 68, rank=1)
        replace(*names)

    monkeypatch.setattr(os, "replace", late)
    write_status(path, "out_of_memory", "short", 68, rank=0)
    assert json.loads(path.read_text())["message"] == "short"
    assert "cannot be written" not in capsys.readouterr().out
