"""Starts the processes that measure, and says on what they were measured."""

import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.settings import ROOT, Settings, save

PACKAGES = ("torch", "transformers", "trl", "accelerate", "deepspeed")


def environment(settings: Settings) -> dict[str, str]:
    """One process that owns one device, as a launcher would set it up."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] if settings.cuda else ""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "TOKENIZERS_PARALLELISM": "false"}
    if settings.mode != "none":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return env


def python(settings: Settings, module: str, *args: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", module, *args]
    return subprocess.run(command, cwd=ROOT, env=environment(settings), **options)


def make_material(points: Sequence[Settings]) -> None:
    Path(points[0].folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        asked = Path(folder, "settings.json")
        save(points, asked)
        python(points[0], "benchmarks.material", str(asked), stdout=sys.stderr, check=True)


def measure_side(points: Sequence[Settings], side: str) -> list[dict[str, Any]]:
    """What benchmarks/sides.py finds at each point; its output goes to the standard error.

    One process measures all points, since starting takes longer than measuring; DeepSpeed leaves state
    behind, so with it each point has its own. A point at which a process dies is {"error": …}; a new one
    goes on.
    """
    found: list[dict[str, Any]] = []
    while len(found) < len(points):
        asked = points[len(found) :] if points[0].mode == "none" else points[len(found) : len(found) + 1]
        with tempfile.TemporaryDirectory() as folder:
            settings, results = Path(folder, "settings.json"), Path(folder, "results.json")
            save(asked, settings)
            done = python(points[0], "benchmarks.sides", side, str(settings), str(results), stdout=sys.stderr)
            finished = json.loads(results.read_text()) if results.exists() else []
        found += finished
        if len(finished) < len(asked):
            found.append({"error": f"its process ended with code {done.returncode}"})
    return found


def measure_ceilings(settings: Settings) -> dict[str, float]:
    done = python(settings, "benchmarks.floor", settings.device, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def provenance(settings: Settings, named: str | None) -> dict[str, Any]:
    return {
        "machine": machine(settings.device),
        "versions": {name: version(name) for name in PACKAGES},
        "commit": named or commit(),
        "date": date.today().isoformat(),
    }


def machine(device: str) -> str:
    if device == "cuda":  # asked elsewhere: this process must not hold memory of the GPU
        ask = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    return f"{names[0] if names else platform.machine()}, {len(names)} cores, OMP_NUM_THREADS {threads}"


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
