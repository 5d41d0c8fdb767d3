"""Two ZeRO-3 processes under the launcher that train.sh uses, and real signals: all ranks end together, with
a checkpoint, the cause in status.json and an exit code of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from open_r1.complete import complete_marker
from tests.test_distributed import folder, launch_flags, one  # noqa: F401 (fixtures)
from tests.test_grpo import lines

ROOT = Path(__file__).resolve().parent.parent
# The end of train.sh, with the worker instead of grpo.py: DeepSpeed on the CPU needs its help.
SCRIPT = r"""
set -euo pipefail
source "$ROOT/scripts/setup.sh"
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=900
started=$(date +%s.%N)
run_stoppable "$PYTHON" "$ROOT/scripts/launch.py" --num_processes 2 --num_machines 1 \
    --main_process_port 0 --mixed_precision no --dynamo_backend no --use_deepspeed \
    --deepspeed_config_file "$ROOT/zero3.json" "$@"
"$PYTHON" "$ROOT/open_r1/status.py" "$OUT" "$started" "$code"
exit 0
"""


class Run:
    """The script above with the processes it started."""

    started: list[subprocess.Popen] = []

    def __init__(self, folder: Path, name: str, *flags, fault: str = ""):  # noqa: F811
        self.out, self.result = folder / name, folder / f"{name}.pt"
        env = os.environ | {"ROOT": str(ROOT), "PYTHON": sys.executable, "OUT": str(self.out)}
        env |= {"OMP_NUM_THREADS": "1"} | ({"FAULT": fault} if fault else {})
        zero3 = ("--bf16", "false", "--deepspeed", folder / "zero3.json", "--save_strategy", "steps")
        arguments = [ROOT / "tests/distributed_worker.py", "zero", self.result]
        arguments += [*launch_flags(folder, name, 2), *zero3, *flags]
        self.log = folder / f"{name}.log"
        self.bash = subprocess.Popen(
            ["bash", "-c", SCRIPT, "train.sh", *map(str, arguments)],
            env=env, cwd=ROOT, stdout=self.log.open("w"), stderr=subprocess.STDOUT,
        )  # fmt: skip
        Run.started.append(self.bash)

    def launcher(self) -> int:
        """The process of accelerate launch."""
        (child,) = children(self.bash.pid)
        return child

    def wait_for_update(self, step: int) -> None:
        deadline = time.monotonic() + 200
        while self.updates() < step:
            assert self.bash.poll() is None and time.monotonic() < deadline, self.log.read_text()[-6000:]
            time.sleep(0.1)

    def updates(self) -> int:
        """Of its log; a line that is being written is none yet."""
        log = self.out / "logs.jsonl"
        whole = log.read_bytes().split(b"\n")[:-1] if log.exists() else []
        return json.loads(whole[-1])["step"] if whole else 0

    def end(self, timeout: float = 200) -> tuple[int, dict]:
        code = self.bash.wait(timeout)
        return code, json.loads((self.out / "status.json").read_text())

    def last_line(self) -> str:
        return self.log.read_text().splitlines()[-1]


@pytest.fixture(autouse=True)
def none_goes_on():
    """A test that fails leaves no run of a thousand updates beside those that follow."""
    yield
    for bash in Run.started:
        if bash.poll() is None:
            for process in [*children(bash.pid), bash.pid]:
                os.kill(process, signal.SIGKILL)
    Run.started.clear()


def children(process: int) -> list[int]:
    return list(map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()))


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_signal_to_one_rank_between_rows_and_the_same_command_again(folder, one):  # noqa: F811
    """Row 3 is the first of the second update: it is made again, as if nothing had been."""
    run = Run(folder, "signalled", "--save_steps", 3, fault="1:3:SIGTERM")
    code, status = run.end()
    assert (code, status["cause"], status["exit_code"]) == (143, "signal", 143), run.log.read_text()[-6000:]
    assert "exit code 143: Stopped by SIGTERM. 1 of 3 updates are done." in run.last_line()
    assert "goes on from checkpoint-1." in run.last_line()
    assert complete_marker(run.out / "checkpoint-1")["step"] == 1

    # Again; and the loss of rank 1 in the last update is not a number: that update is dropped.
    again = Run(folder, "signalled", "--save_steps", 3, "--on_nonfinite", "skip", fault="1:3:nan")
    code, status = again.end()
    assert (code, status["cause"]) == (0, "finished"), again.log.read_text()[-6000:]
    got = torch.load(again.result, weights_only=False)
    a, b = got["gradients"][0], one["gradients"][1]
    norm = sum(value.square().sum() for value in b.values()).sqrt()
    assert sum((a[n] - b[n]).square().sum() for n in b).sqrt() / norm < 1e-5
    logs = [log for log in lines(again.out / "logs.jsonl") if "reward" in log]
    assert [(log["step"], log["dropped_updates"]) for log in logs] == [(1, 0), (2, 0), (3, 1)]
    assert all(torch.isfinite(value).all() for value in got["masters"].values())
    assert "The loss of update 3 is not finite; data set rows (rewards) of rank 1: " in again.log.read_text()


@pytest.mark.parametrize("to, number", [("the launcher", "SIGUSR1"), ("train.sh", "SIGINT")])
def test_a_signal_to_the_launcher_or_to_the_script(to, number, folder):  # noqa: F811
    run = Run(folder, f"to_{to}", "--max_steps", 1000, "--save_steps", 500)
    run.wait_for_update(1)
    ranks = children(run.launcher())
    assert len(ranks) == 2
    os.kill(run.bash.pid if to == "train.sh" else run.launcher(), signal.Signals[number])
    code, status = run.end(timeout=60)
    assert code == status["exit_code"] == 128 + signal.Signals[number], run.log.read_text()[-6000:]
    (checkpoint,) = run.out.glob("checkpoint-*")
    assert complete_marker(checkpoint) and f"goes on from {checkpoint.name}." in run.last_line()
    assert not any(map(is_alive, ranks))


def test_a_rank_that_dies_and_a_loss_that_is_not_a_number_end_the_job(folder):  # noqa: F811
    """Within a minute, with the reason in the last line."""
    run = Run(folder, "killed", "--max_steps", 1000, "--save_steps", 1, fault="1:3:SIGKILL")
    run.wait_for_update(1)
    code, status = run.end(timeout=60)
    assert (code, status["cause"]) == (67, "running"), run.log.read_text()[-6000:]
    assert "exit code 67: A process died without a word" in run.last_line()
    assert "process 1 ended first, with exit code -9" in run.log.read_text().splitlines()[-2]

    run = Run(folder, "killed", "--max_steps", 1000, "--save_steps", 1, fault="1:2:nan")
    code, status = run.end()
    assert (code, status["cause"]) == (65, "not finite"), run.log.read_text()[-6000:]
    assert "The loss of update 2 is not finite; data set rows (rewards) of rank 1: " in run.last_line()
    assert [path.name for path in run.out.glob("checkpoint-*")] == ["checkpoint-1"]


def test_a_launcher_that_is_killed_leaves_no_ranks_behind(folder):  # noqa: F811
    run = Run(folder, "orphans", "--max_steps", 1000, "--save_steps", 500)
    run.wait_for_update(1)
    ranks = children(run.launcher())
    os.kill(run.launcher(), signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(map(is_alive, ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (checkpoint,) = run.out.glob("checkpoint-*")
    assert complete_marker(checkpoint)
    run.end(timeout=60)


# --- train.sh itself, on the CPU ----------------------------------------------------------------------------


def train_sh(folder: Path, name: str, *flags, gpus: int = 0, **env) -> Run:  # noqa: F811
    run = Run.__new__(Run)
    run.out, run.log = folder / name, folder / f"{name}.log"
    settings = {
        "MODEL": folder / "base", "DATA": folder / "train", "VAL": folder / "val", "OUT": run.out,
        "NUM_GPUS": gpus, "SUBMISSION": folder / f"{name}_best", "PYTHON": sys.executable,
        "OMP_NUM_THREADS": 1,
    } | env  # fmt: skip
    run.bash = subprocess.Popen(
        ["bash", str(ROOT / "train.sh"), "--max_completion_length", "8", "--report_to", "none", *flags],
        env=os.environ | {k: str(v) for k, v in settings.items()},
        stdout=run.log.open("w"), stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    Run.started.append(run.bash)
    return run


def test_ctrl_c_in_a_terminal_is_one_signal(folder):  # noqa: F811
    """It reaches the script and what it runs, and the script passes it on: a checkpoint all the same."""
    run = train_sh(folder, "ctrl_c")
    run.wait_for_update(1)
    os.killpg(run.bash.pid, signal.SIGINT)
    code, status = run.end(timeout=60)
    assert (code, status["exit_code"]) == (130, 130), run.log.read_text()[-6000:]
    assert "Stopped by SIGINT." in run.last_line()
    (checkpoint,) = run.out.glob("checkpoint-*")
    assert complete_marker(checkpoint)
    assert not (run.out / "selfcheck").exists()


def test_after_the_deadline_come_averaging_and_the_self_check(folder):  # noqa: F811
    run = train_sh(folder, "deadline", "--max_hours", "0.01", "--max_steps", "100000")
    code, status = run.end()
    assert (code, status["cause"]) == (0, "deadline"), run.log.read_text()[-6000:]
    assert "Stopped by --max_hours" in run.log.read_text()
    assert (run.out / "selfcheck/selfcheck.json").exists()
    found = json.loads((run.out / "finalize.json").read_text())
    candidates = list(found["candidates"])
    # As many as there was time for.
    masters = {master.stem.replace("-", " ") for master in run.out.glob("masters/*")}
    mixed = {name.split(" x ")[1] for name in candidates if " x " in name}
    assert candidates[0] == "base" and masters <= set(candidates)
    assert len(mixed) == min(1, len(masters)) and mixed <= masters | {"average"}
    assert found["complete"] and found["why"] in run.log.read_text()


def test_a_second_signal_stops_at_once(tmp_path):
    """But not the same one, delivered twice."""
    script = (
        "import time\n"
        "from open_r1 import control\n"
        "control.SAME_SIGNAL_S = 3.0\n"
        "run = control.RunControl()\n"
        "run.handle_signals()\n"
        "run.began = True\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.01)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE)
    process.stdout.readline()
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
    assert process.poll() is None
    time.sleep(3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == -signal.SIGTERM
