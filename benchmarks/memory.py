"""Measures the memory of an update, and compares it with what open_r1/memory.py expects.

    python benchmarks/memory.py --size 2b --device cuda --json memory.json
    python benchmarks/memory.py --size 2b --device cuda --only "plain" "no sharding"

Each setting is two updates (rollout, rows, optimizer) of the product's own trainer in a process of its own,
with random weights; the second compiles nothing new. What is measured is what PyTorch's allocator counts.
"""

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.clocks import GIB
from benchmarks.settings import Settings

SETTINGS = {
    "plain": {"mode": "zero3", "prompts": 8, "prompts_per_row": 1, "new_tokens": 256},
    "gradient checkpointing": {
        "mode": "zero3", "prompts": 8, "prompts_per_row": 1, "new_tokens": 256,
        "gradient_checkpointing": True,
    },
    "four prompts a row": {"mode": "zero3", "prompts": 8, "prompts_per_row": 4, "new_tokens": 128},
    "no sharding": {"mode": "none", "prompts": 4, "prompts_per_row": 1, "new_tokens": 128},
    "larger images, checkpointing": {
        "mode": "zero3", "prompts": 8, "prompts_per_row": 4, "new_tokens": 256, "width": 1344, "height": 896,
        "gradient_checkpointing": True,
    },
    "recipe, one of two GPUs": {
        "mode": "zero3", "prompts": 8, "prompts_per_row": 1, "new_tokens": 256, "flags": {"oversample": 2},
    },
    "frozen vision tower": {
        "mode": "zero3", "prompts": 8, "prompts_per_row": 1, "new_tokens": 256,
        "flags": {"freeze_vision_tower": True},
    },
    "LoRA": {
        "mode": "zero3", "prompts": 8, "prompts_per_row": 1, "new_tokens": 256,
        "flags": {"use_peft": True, "lora_r": 16},
    },
}  # fmt: skip
UPDATES = 2


class PhasePeaks:
    """The most that was allocated and reserved in chosen methods, in GiB; without the parts inside a part."""

    def __init__(self):
        self.peaks: dict[str, dict[str, float]] = defaultdict(lambda: {"allocated": 0.0, "reserved": 0.0})
        self.outer = ["the rest"]

    def watch(self, owner: Any, method: str, part: str) -> None:
        original = getattr(owner, method)

        def watched(*args, **kwargs):
            self.note()
            self.outer.append(part)
            try:
                return original(*args, **kwargs)
            finally:
                self.note()
                self.outer.pop()

        setattr(owner, method, watched)

    def note(self) -> None:
        """What has happened since the last note belongs to the part that runs."""
        peak, cuda = self.peaks[self.outer[-1]], torch.cuda
        if cuda.is_available():
            peak["allocated"] = max(peak["allocated"], cuda.max_memory_allocated() / GIB)
            peak["reserved"] = max(peak["reserved"], cuda.max_memory_reserved() / GIB)
            cuda.reset_peak_memory_stats()


def measure_memory(settings: Settings, out: Path) -> dict[str, Any]:
    """In the process of a setting; benchmarks/sides.py calls it."""
    from transformers import TrainerCallback

    from benchmarks.sides import capture_product, stepper
    from open_r1 import memory
    from open_r1 import trainer as trainer_module

    peaks, found = PhasePeaks(), {}

    class Watch(TrainerCallback):
        def __init__(self, trainer):
            self.trainer = trainer

        def on_train_begin(self, args, state, control, **kwargs):
            trainer = self.trainer
            peaks.note()
            peaks.outer = ["between"]  # what comes before is the making of the models
            for owner, method, part in (
                (trainer_module, "rehearse", "rehearsal"),
                (trainer.engine, "_prefill", "prefill"),
                (trainer.engine, "_decode", "decode"),
                (trainer, "refresh", "refresh"),
                (trainer, "training_step", "row"),
                (*stepper(trainer), "step"),
            ):
                peaks.watch(owner, method, part)

        def on_train_end(self, args, state, control, **kwargs):
            peaks.note()
            if torch.cuda.is_available():
                free, total = torch.cuda.mem_get_info()
                found["outside"] = (total - free - torch.cuda.memory_reserved()) / GIB

    trainer = capture_product(settings, out, Watch)
    prompt = trainer.encoder.encode(trainer.train_dataset, 0)
    longest = memory.Longest(prompt.input_ids.numel(), len(prompt.pixel_values))
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in trainer.model.parameters())
    expected = memory.estimate(trainer.model.config, parameters, trainer.args, longest)
    parts = expected.held | expected.phases | {"outside": expected.outside}
    return {
        "expected_gib": {
            "allocated": expected.allocated / GIB, "reserved": expected.reserved / GIB,
            "parts": {name: size / GIB for name, size in parts.items()},
        },
        "measured_gib": {
            kind: max(peak[kind] for peak in peaks.peaks.values()) for kind in ("allocated", "reserved")
        } | {"phases": dict(peaks.peaks)} | found,
        "prompt_tokens": longest.tokens, "patches": longest.patches,
    }  # fmt: skip


def shown(name: str, result: dict[str, Any]) -> str:
    if "error" in result:
        return f"{name}: {result['error']}"
    expected, measured = result["expected_gib"], result["measured_gib"]
    lines = [f"{name}: prompts of {result['prompt_tokens']} tokens, {result['patches']} patches"]
    for kind in ("allocated", "reserved"):
        ratio = f", {expected[kind] / measured[kind] - 1:+.1%}" if measured[kind] else ""
        lines.append(f"  {kind}: expected {expected[kind]:.2f}, measured {measured[kind]:.2f} GiB{ratio}")
    lines += [f"    expected {part:<32}{size:7.2f}" for part, size in expected["parts"].items()]
    for part, peak in measured["phases"].items():
        sizes = f"{peak['allocated']:7.2f} allocated, {peak['reserved']:.2f} reserved"
        lines.append(f"    measured in {part:<12}{sizes}")
    return "\n".join(lines)


def main() -> None:
    from benchmarks.processes import make_material, measure_side, provenance

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=("tiny", "2b"), default="tiny", help="2b: Qwen2-VL-2B's shape")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="these settings")
    parser.add_argument("--folder", default=Settings.folder, help="where models and images are made and kept")
    parser.add_argument("--json", metavar="FILE", help="write the results there, behind each setting")
    parser.add_argument("--commit", help="what to name in the result where git cannot tell")
    args = parser.parse_args()
    common = {"size": args.size, "device": args.device, "folder": args.folder}
    common |= {"steps": UPDATES, "warmup": 0, "parts_steps": 0}
    points = {name: Settings(**common | SETTINGS[name]) for name in args.only}
    results = []
    for name, settings in points.items():
        make_material([settings])  # a model there is not made again
        (result,) = measure_side([settings], "memory")
        print(shown(name, result), flush=True)
        described = asdict(replace(settings, folder=""))
        results.append({"name": name, **result, "settings": described, **provenance(settings, args.commit)})
        if args.json:
            Path(args.json).write_text(json.dumps(results, indent=2) + "\n")
    if any("error" in result for result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
