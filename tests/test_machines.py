"""Two "machines" on loopback: train.sh is started on each with one process, and they make one run."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from open_r1 import machines
from open_r1.check_args import check_args
from tests.test_distributed import ROOT, folder  # noqa: F401 (a fixture)
from tests.test_grpo import flags, lines, parse


def start(folder: Path, machine: int, port: int, out: Path, *more):  # noqa: F811
    settings = {
        "MODEL": folder / "base", "DATA": folder / "train", "VAL": folder / "val", "OUT": out,
        "SUBMISSION": folder / f"best_of_{machine}", "PYTHON": sys.executable, "OMP_NUM_THREADS": 1,
        "NUM_GPUS": 0, "NUM_MACHINES": 2, "MACHINE_RANK": machine, "MAIN_PROCESS_IP": "127.0.0.1",
        "MAIN_PROCESS_PORT": port,
    }  # fmt: skip
    command = (
        "bash", ROOT / "train.sh", "--max_steps", 2, "--save_steps", 2, "--eval_limit", 2,
        "--max_completion_length", 8, "--num_generations", 2, "--report_to", "none", "--finalize", "false",
        *more,
    )  # fmt: skip
    return subprocess.Popen(
        list(map(str, command)), env=os.environ | {k: str(v) for k, v in settings.items()},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


@pytest.mark.timeout(600)
def test_two_machines_make_one_run(folder):  # noqa: F811
    port, out = free_port(), folder / "machines"
    both = [start(folder, machine, port, out) for machine in (0, 1)]
    shown = [process.communicate(timeout=500)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], shown[0][-3000:] + shown[1][-3000:]
    assert "machines     2 with 1 processes each" in shown[0] and "| reward" not in shown[1]
    assert [log["step"] for log in lines(out / "logs.jsonl") if "reward" in log] == [1, 2]
    assert json.loads((out / "checkpoint-2/COMPLETE").read_text())["world_size"] == 2
    assert (out / "selfcheck/selfcheck.json").exists()
    assert (folder / "best_of_0/config.json").exists() and not (folder / "best_of_1").exists()

    # Another folder, another flag: told before anything is trained, by both.
    port = free_port()
    both = [start(folder, 0, port, folder / "a"), start(folder, 1, port, folder / "b", "--beta", 0.1)]
    shown = [process.communicate(timeout=500)[0] for process in both]
    assert all(process.returncode for process in both)
    assert "is not one folder on all machines" in shown[0]
    assert "--beta of machine 1 and of machine 0 differ (0.0 and 0.1): start the same command" in shown[0]
    assert not (folder / "a/logs.jsonl").exists() and not list((folder / "a").glob(".shared-*"))


def test_offloading_to_deepspeeds_own_optimizer_needs_a_compiler(folder, monkeypatch):  # noqa: F811
    parsed = parse(*flags(folder, "out", "--max_steps", 2))
    parsed[1].deepspeed = json.loads((ROOT / "zero3_offload.json").read_text())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    check_args(*parsed)
    del parsed[1].deepspeed["zero_force_ds_cpu_optimizer"]
    with pytest.raises(ValueError, match=r"g\+\+ and ninja compile: install them, or set"):
        check_args(*parsed)


def test_a_dry_run_counts_the_processes_of_all_machines(folder, monkeypatch):  # noqa: F811
    _, args, _ = parse(*flags(folder, "out", "--max_steps", 2))
    monkeypatch.setenv("NUM_MACHINES", "3")
    machines.plan_dry_run(args)
    assert args.processes == 3
