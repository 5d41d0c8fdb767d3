"""Measures one GRPO update of this project and of TRL's GRPOTrainer, side by side on the same model, prompts
and lengths.

    python benchmarks/step.py --size tiny --device cpu --new_tokens 16 --image 224x224
    python benchmarks/step.py --size 2b --device cuda --mode zero3 --new_tokens 128 --json out.json
    python benchmarks/step.py --table out.json           the table of a README

Random weights, images of coloured patches, completions that all have exactly --new_tokens tokens. Each side
runs in a process of its own; benchmarks/README.md says what is measured and how.
"""

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from dataclasses import fields, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.floor import floor
from benchmarks.report import summary, table
from benchmarks.settings import ROOT, Settings

SIDES = ("product", "trl")
PACKAGES = ("torch", "transformers", "trl", "accelerate", "deepspeed")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=("tiny", "2b"), default="tiny", help="2b: Qwen2-VL-2B's shape")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--mode", choices=("none", "zero2", "zero3"), default="none", help="DeepSpeed stage")
    parser.add_argument("--new_tokens", type=int, default=128, help="tokens of every completion")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of an update")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--image", default="480x320", help="width x height of all images, in pixels")
    parser.add_argument("--prompts_per_row", type=int, help="of the product's packed rows (default: as fit)")
    parser.add_argument("--trl_prompts_per_batch", type=int, default=1, help="of TRL's forward passes")
    parser.add_argument("--gradient_checkpointing", action="store_true", help="on both sides")
    parser.add_argument("--steps", type=int, default=5, help="measured updates of each side")
    parser.add_argument("--warmup", type=int, default=2, help="updates before them")
    parser.add_argument("--parts_steps", type=int, default=3, help="updates behind them that time the parts")
    parser.add_argument("--only", choices=SIDES, help="one side alone")
    parser.add_argument("--folder", default=Settings.folder, help="where models and images are made and kept")
    parser.add_argument("--json", metavar="FILE", help="write the result there; -: to the standard output")
    parser.add_argument("--commit", help="what to name in the result where git cannot tell")
    parser.add_argument("--table", metavar="FILE", help="print the table of such a result, measure nothing")
    return parser.parse_args()


def settings_of(args: argparse.Namespace) -> Settings:
    width, height = map(int, args.image.split("x"))
    own = {f.name: getattr(args, f.name) for f in fields(Settings) if hasattr(args, f.name)}
    settings = replace(Settings(**own), width=width, height=height)
    settings.refuse()
    return settings


# --- processes


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
    return subprocess.run(command, cwd=ROOT, env=environment(settings), check=True, **options)


def measure_side(settings: Settings, side: str) -> dict[str, Any]:
    """What benchmarks/sides.py finds; its output goes to the standard error."""
    print(f"--- {side}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        asked, found = Path(folder, "settings.json"), Path(folder, "result.json")
        settings.save(asked)
        python(settings, "benchmarks.sides", side, str(asked), str(found), stdout=sys.stderr)
        return json.loads(found.read_text())


def make_material(settings: Settings) -> None:
    Path(settings.folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        asked = Path(folder, "settings.json")
        settings.save(asked)
        python(settings, "benchmarks.material", str(asked), stdout=sys.stderr)


def measure_ceilings(settings: Settings) -> dict[str, float]:
    done = python(settings, "benchmarks.floor", settings.device, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


# --- one point


def machine(device: str) -> str:
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    return f"{names[0] if names else platform.machine()}, {len(names)} cores, OMP_NUM_THREADS {threads}"


def commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def provenance(settings: Settings, named: str | None) -> dict[str, Any]:
    return {
        "machine": machine(settings.device),
        "versions": {name: version(name) for name in PACKAGES},
        "commit": named or commit(),
        "date": date.today().isoformat(),
    }


def measure(settings: Settings, sides: tuple[str, ...], limits: dict[str, float]) -> dict[str, Any]:
    """One point: {"ratio", "product_s", "trl_s", "floor_s", "floor_parts_s", the sides, "settings"}."""
    make_material(settings)
    found = {side: measure_side(settings, side) for side in sides}
    lengths = {side: one["prompt_tokens"] for side, one in found.items() if "error" not in one}
    if len(set(lengths.values())) > 1:
        raise RuntimeError(f"the sides were given prompts of different lengths: {lengths}")
    seconds = {side: found.get(side, {}).get("update_s") for side in SIDES}
    both = all(seconds.values())
    result = {
        "ratio": seconds["trl"] / seconds["product"] if both else None,
        **{f"{side}_s": seconds[side] for side in SIDES},
        "floor_s": None,
        **found,
        "settings": vars(settings) | {"folder": None, "prompts_per_row": settings.row_prompts()},
    }
    if lengths:
        parts = floor(settings, min(lengths.values()), limits)
        result |= {"floor_s": parts.pop("update_s"), "floor_parts_s": parts}
    return result


def write(result: Any, to: str | None) -> None:
    text = json.dumps(result, indent=2)
    if to == "-":
        print(text)
    elif to:
        Path(to).write_text(text + "\n")


def main() -> None:
    args = parse()
    if args.table:
        print(table(json.loads(Path(args.table).read_text())))
        return
    try:
        settings = settings_of(args)
    except ValueError as refusal:
        sys.exit(f"step.py: {refusal}")
    limits = measure_ceilings(settings)
    result = measure(settings, (args.only,) if args.only else SIDES, limits)
    result |= {"ceilings": limits, **provenance(settings, args.commit)}
    write(result, args.json)
    if args.json != "-":
        print(summary(result))


if __name__ == "__main__":
    main()
