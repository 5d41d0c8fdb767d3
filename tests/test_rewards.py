"""Reward functions that raise, hang or return nonsense: counted, shown, stopped on all ranks; never a 0."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from open_r1.grpo import reward_funcs_registry
from open_r1.rewards import (
    Reward,
    RewardCaller,
    RewardError,
    as_conversations,
    check_signature,
    resolve_rewards,
    try_rewards,
)
from open_r1.time_limit import TimeIsUp, time_limit
from tests.test_grpo import folder, lines, run  # noqa: F401 (folder is a fixture)
from tests.tiny import tiny_tokenizer

ROOT = Path(__file__).resolve().parent.parent
TWO = {"completions": as_conversations(["a", "b"]), "answer": [3, 3]}


def call(returned) -> list[float]:
    return Reward("odd", lambda completions: returned, 1.0)(TWO)


# --- What a function returns ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "returned, values",
    [
        ([1, 0.5], [1, 0.5]),
        ((True, False), [1, 0]),
        (np.array([1, 2]), [1, 2]),
        (np.array([0.5, 0.25], dtype=np.float16), [0.5, 0.25]),
        ([np.float32(0.5), np.bool_(True)], [0.5, 1]),
        (torch.tensor([1.0, 2.0], requires_grad=True), [1, 2]),
        ([torch.tensor(1), torch.tensor([0.5])], [1, 0.5]),
        (np.array([1.0, None], dtype=object), [1, None]),
        ([None, None], [None, None]),
    ],
)
def test_numbers_in_every_form_are_taken(returned, values):
    got = call(returned)
    assert [None if math.isnan(value) else value for value in got] == values
    assert all(type(value) is float for value in got)


@pytest.mark.parametrize(
    "returned, words",
    [
        ([1.0], "must return a list of 2 numbers or None, not \\[1.0\\]"),
        ([1.0] * 3, "must return a list of 2"),
        ([], "must return a list of 2"),
        ("ab", "must return a list of 2"),
        (None, "not None"),
        (3, "not 3"),
        ({0: 1.0, 1: 2.0}, "must return a list of 2"),
        ((value for value in (1, 2)), "not <generator"),
        (np.float64(3), "not 3.0"),
        (["1", "2"], "returned str '1'"),
        ([[1.0], [2.0]], "returned list \\[1.0\\]"),
        (np.ones((2, 2)), "returned list \\[1.0, 1.0\\]"),
        (torch.ones(2, 1), "returned list \\[1.0\\]"),
        ([torch.ones(2), 1.0], "returned Tensor tensor"),
        ([float("nan"), 1.0], "returned float nan"),
        (np.array([np.nan, 1.0]), "returned float nan"),
        ([1.0, float("inf")], "returned float inf"),
        ([1e300, 0.0], "returned float 1e\\+300"),  # infinite in float32
        ([10**400, 0], "returned int 1000"),
        ([1j, 0], "returned complex 1j"),
        ([1.0, "x" * 10_000], "returned str 'xxx"),
    ],
)
def test_nonsense_is_named(returned, words):
    with pytest.raises(RewardError, match=f"^reward odd .*{words}") as error:
        call(returned)
    assert len(str(error.value)) < 400


def test_an_exception_says_what_and_where():
    def bad(completions):
        return [1 / 0]

    with pytest.raises(RewardError, match=r"bad raised ZeroDivisionError: .* \(.*test_rewards.py, line"):
        Reward("bad", bad, 1.0)(TWO)


def test_functions_do_not_see_each_others_changes():
    def greedy(completions, answer):
        answer.pop()
        completions[0][0]["content"] = "changed"
        return [0.0, 0.0]

    seen = []
    watch = Reward("watch", lambda completions, answer: seen.append((completions, answer)) or [0, 0], 1.0)
    RewardCaller([Reward("greedy", greedy, 1.0), watch], 0)(TWO)
    assert seen == [(as_conversations(["a", "b"]), [3, 3])]


def test_a_name_that_means_two_things_is_refused():
    reward = Reward("mine", lambda completions, group: [], 1.0)
    check_signature(reward, ["answer"])
    with pytest.raises(ValueError, match="asks for group, which is a column of the data set and also"):
        check_signature(reward, ["answer", "group"])


def test_what_cannot_be_imported_or_called_is_refused(tmp_path, monkeypatch):
    (tmp_path / "broken_rewards.py").write_text("1 / 0\n")
    (tmp_path / "no_function.py").write_text("reward = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="broken_rewards.reward could not be imported .ZeroDivisionError"):
        resolve_rewards(["broken_rewards.reward"], None, {})
    with pytest.raises(ValueError, match="no_function.reward is a int, no function"):
        resolve_rewards(["no_function.reward"], None, {})


# --- Hanging -------------------------------------------------------------------------------------------


def spin():
    while True:
        pass


def swallow_everything():
    while True:
        try:
            time.sleep(60)
        except Exception:
            pass


def swallow_once():
    try:
        spin()
    except BaseException:  # as a bare except does
        spin()


@pytest.mark.parametrize(
    "hang",
    [
        spin,
        swallow_everything,
        swallow_once,
        lambda: time.sleep(60),
        threading.Event().wait,
        lambda: re.match("(a+)+b", "a" * 40),
        lambda: subprocess.run(["sleep", "60"]),
    ],
)
def test_a_function_that_hangs_is_interrupted(hang):
    """And what was set before is there again: the handler, and the alarm, which is pytest's own."""
    handler, before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0]
    threads, started = threading.active_count(), time.monotonic()
    reward = Reward("slow", lambda completions: hang(), 1.0, timeout=0.2)
    with pytest.raises(RewardError, match=r"slow took more than --reward_timeout 0.2 s \(.*, line") as late:
        reward(TWO)
    assert "time_limit.py" not in str(late.value)  # but where it hangs
    assert time.monotonic() - started < 5
    assert signal.getsignal(signal.SIGALRM) is handler and threading.active_count() == threads
    assert abs(before - signal.getitimer(signal.ITIMER_REAL)[0]) < 5
    time.sleep(0.3)  # no alarm is left over


@pytest.mark.parametrize("leaving", [SystemExit(3), KeyboardInterrupt()])
def test_a_function_that_exits_has_failed(leaving):
    """It must not end the run without a word."""

    def leave(completions):
        raise leaving

    with pytest.raises(RewardError, match=f"reward leaving raised {type(leaving).__name__}"):
        Reward("leaving", leave, 1.0)(TWO)


def test_a_thread_that_a_reward_left_does_not_keep_the_process():
    code = (
        "import sys, threading, time; from open_r1.grpo import threads_left_behind\n"
        "with threads_left_behind():\n"
        "    threading.Thread(target=time.sleep, args=[1000]).start(); sys.exit('a last word')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.endswith("a last word\n")


def test_other_signals_reach_their_handlers_inside_a_reward():
    got = []
    previous = signal.signal(signal.SIGUSR1, lambda *_: got.append("USR1"))
    try:
        with time_limit(5):
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.05)
        assert got == ["USR1"]
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_an_alarm_that_was_set_before_goes_off_when_it_is_due():
    rang = threading.Event()
    handler = signal.signal(signal.SIGALRM, lambda *_: rang.set())
    due, _ = signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(TimeIsUp), time_limit(0.1):
            spin()
        assert not rang.is_set()
        time.sleep(0.4)
        assert rang.is_set()
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, due)


def test_in_another_thread_there_is_no_limit():
    done = []
    thread = threading.Thread(target=lambda: done.append(Reward("r", lambda completions: [0, 1], 1.0)(TWO)))
    thread.start()
    thread.join()
    assert done == [[0, 1]]


def test_what_hangs_in_c_ends_the_process_and_says_where():
    script = (
        "from open_r1.time_limit import time_limit\n"
        "def stuck():\n"
        "    sum(range(10**13))\n"
        "with time_limit(1):\n"
        "    stuck()\n"
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and time.monotonic() - started < 100
    assert "Timeout (0:00:07)!" in done.stderr and "in stuck" in done.stderr


# --- Counting ------------------------------------------------------------------------------------------


def fails(completions):
    raise OSError("no judge")


GOOD = Reward("good", lambda completions: [0.25, None], 1.0)


def test_failures_of_all_ranks_are_counted_and_nothing_is_learned_from_them(capsys):
    caller = RewardCaller([GOOD, Reward("bad", fails, 0.5)], max_failures=2)
    mine = caller(TWO).view(1, 2, 2)
    assert mine[..., 1].isinf().all()
    assert "rank 0: reward bad raised OSError: no judge" in capsys.readouterr().out
    other = torch.tensor([[[0.5, 1.0], [0.0, 0.0]]])
    settled = caller.settle(torch.cat([mine, other]), ranks=2)
    assert settled[0].isnan().all()  # what is left of the sum would be another reward
    assert torch.equal(settled[1], other[0])
    assert "reward bad has failed 1 times, of 2 allowed" in capsys.readouterr().out
    assert caller.numbers() == {
        "reward_failures/good": 0, "reward_failures/bad": 1, "rewards/good/failed": 0,
        "rewards/bad/failed": 0.5, "rewards/good/unjudged": 0.25, "rewards/bad/unjudged": 0,
    }  # fmt: skip
    with pytest.raises(RewardError, match="bad has failed 3 times, of 2 .* time: reward bad raised OSE"):
        caller.settle(torch.cat([mine, mine]), ranks=2)


def test_a_function_that_is_only_logged_takes_nothing_from_the_others():
    caller = RewardCaller([GOOD, Reward("bad", fails, 0.0)], max_failures=1)
    settled = caller.settle(caller(TWO).view(1, 2, 2))
    assert settled[0, 0, 0] == 0.25 and settled[0, 1, 0].isnan() and settled[..., 1].isnan().all()


def test_a_reward_that_fails_on_gold_answers_is_a_fault_before_the_run():
    rows = [{"question": "How many?", "answer": 3, "solution": "3"}]
    stuck = Reward("stuck", lambda completions: spin(), 1.0, timeout=0.1)
    _, faults = try_rewards([Reward("bad", fails, 0.0), stuck], rows, [[]], tiny_tokenizer())
    assert "reward bad raised OSError: no judge" in faults[0] and "tried on gold answers" in faults[0]
    assert "reward stuck took more than --reward_timeout 0.1 s" in faults[2]


def test_a_run_goes_on_after_a_failure_and_shows_it(folder, tmp_path, monkeypatch, capsys):  # noqa: F811
    calls = [0]

    def moody(completion_ids, **kwargs):
        calls[0] += 1
        if calls[0] == 3:  # two tries on gold answers come first
            time.sleep(60)
        return [None if sum(ids) % 2 else sum(ids) % 7 / 7 for ids in completion_ids]

    monkeypatch.setitem(reward_funcs_registry, "moody", moody)
    trainer = run(
        folder, tmp_path / "out", "--max_steps", 2, "--save_strategy", "no", "--reward_funcs", "moody",
        "accuracy", "--reward_weights", 1, 0, "--reward_timeout", 0.5,
    )  # fmt: skip
    first, second = (log for log in lines(tmp_path / "out/logs.jsonl") if "loss" in log)
    assert (first["rewards/moody/failed"], second["rewards/moody/failed"]) == (1, 0)
    assert first["reward_failures/moody"] == second["reward_failures/moody"] == 1
    assert first["grad_norm"] == 0 < second["grad_norm"] and first["reward"] is None
    assert 0 < second["rewards/moody/unjudged"] < 1
    assert trainer.state.global_step == 2
    assert "reward moody took more than --reward_timeout 0.5 s" in capsys.readouterr().out


def test_both_ranks_stop_together_when_one_fails(folder, tmp_path):  # noqa: F811
    """Rank 1 raises in the second rollout and hangs in the third; rank 0 would wait for it."""
    flags = (
        "--model_name_or_path", folder / "base", "--dataset_name", folder / "train", "--output_dir",
        tmp_path / "out", "--num_generations", 4, "--max_completion_length", 8, "--max_steps", 9,
        "--gradient_accumulation_steps", 1, "--reward_funcs", "tests.misbehaving.on_rank_1",
        "--reward_timeout", 1, "--max_reward_failures", 1, "--report_to", "none", "--use_cpu", "true",
        "--bf16", "false", "--save_strategy", "no",
    )  # fmt: skip
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    command = [*launcher, ROOT / "tests/distributed_worker.py", "ddp", tmp_path / "none.pt", *flags]
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    out = done.stdout + done.stderr
    assert done.returncode != 0
    assert "rank 1: reward tests.misbehaving.on_rank_1 raised KeyError: 'colour'" in out
    assert "reward tests.misbehaving.on_rank_1 has failed 1 times, of 1 allowed\n" in out
    stopped = "on_rank_1 has failed 2 times, of 1 allowed (--max_reward_failures); the last time: reward"
    # Whoever ends first says it, with the reason that only rank 1 has seen; the other may be ended meanwhile.
    assert out.count(stopped) in (1, 2)
    logs = [json.loads(line) for line in (tmp_path / "out/logs.jsonl").read_text().splitlines()]
    assert [log["rewards/tests.misbehaving.on_rank_1/failed"] for log in logs] == [0, 0.5]
