"""Measures one GRPO update of this project and of TRL's GRPOTrainer, side by side on the same model, prompts
and lengths.

    python benchmarks/step.py --size tiny --device cpu --new_tokens 16 --image 224x224
    python benchmarks/step.py --size 2b --device cuda --mode zero3 --new_tokens 128 --json out.json
    python benchmarks/step.py --size 2b --device cuda --sweep prompts --json sweep.json    then plot.py
    python benchmarks/step.py --size 2b --device cuda --flat 300 --json flat.json
    python benchmarks/step.py --size 2b --device cuda --selfcheck 16 256 --json selfcheck.json
    python benchmarks/step.py --size 2b --device cuda --mode zero3 --token_weights prpo --json weights.json
    python benchmarks/step.py --table out.json           the table of a README

Random weights, images of coloured patches, completions that all have exactly --new_tokens tokens. Each side
runs in a process of its own; benchmarks/README.md says what is measured and how.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.floor import floor
from benchmarks.processes import make_material, measure_ceilings, measure_side, provenance
from benchmarks.report import flat_thirds, table, terminal
from benchmarks.settings import Settings

SIDES = ("product", "trl")
SWEEPS = {
    "prompts": [2, 4, 8, 16, 32, 64],
    "group": [4, 8, 16, 32],
    "new_tokens": [16, 32, 64, 128, 256, 512],
    "side": [224, 448, 672, 896, 1344],
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--size", choices=("tiny", "2b"), default="tiny", help="2b: Qwen2-VL-2B's shape")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--mode", choices=("none", "zero2", "zero3"), default="none", help="DeepSpeed stage")
    add("--new_tokens", type=int, default=128, help="tokens of every completion (--flat: at most)")
    add("--prompts", type=int, default=8, help="prompts of an update")
    add("--group", type=int, default=8, help="completions of a prompt")
    add("--image", default="480x320", help="width x height of all images, in pixels")
    add("--prompts_per_row", type=int, help="of the product's packed rows (default: as many as fit)")
    add("--trl_prompts_per_batch", type=int, default=1, help="of TRL's forward passes")
    add("--gradient_checkpointing", action="store_true", help="on both sides")
    add("--steps", type=int, default=5, help="measured updates of each side")
    add("--warmup", type=int, default=2, help="updates of the product before them")
    add("--parts_steps", type=int, default=3, help="updates of the product behind them, to time its parts")
    add("--only", choices=SIDES, help="one side alone")
    add("--sweep", choices=SWEEPS, help="measure several points; they are added to those in the --json file")
    add("--points", type=int, nargs="+", help="those of the sweep")
    add("--token_weights", metavar="NAME", help="product updates with and without them in turn")
    add("--flat", type=int, default=0, metavar="N", help="N product updates with lengths of all kinds")
    add("--selfcheck", type=int, nargs="+", metavar="T", help="images a second with answers of T tokens")
    add("--images", type=int, default=512, help="that --selfcheck answers")
    add("--folder", default=Settings.folder, help="where models and images are made and kept")
    add("--json", metavar="FILE", help="write the result there; -: to the standard output")
    add("--commit", help="what to name in the result where git cannot tell")
    add("--table", metavar="FILE", help="print the table of such a result, measure nothing")
    return parser.parse_args()


def settings_of(args: argparse.Namespace) -> Settings:
    width, height = map(int, args.image.split("x"))
    own = {f.name: getattr(args, f.name) for f in fields(Settings) if hasattr(args, f.name)}
    return replace(Settings(**own), width=width, height=height)


def points_of(args: argparse.Namespace) -> list[Settings]:
    """The settings of every point that is measured; ValueError for numbers that make no update."""
    settings = settings_of(args)
    if args.selfcheck:
        return [replace(settings, new_tokens=length) for length in args.selfcheck]
    points = [settings]
    if args.sweep == "side":
        points = [replace(settings, width=side, height=side) for side in args.points or SWEEPS["side"]]
    elif args.sweep:
        points = [replace(settings, **{args.sweep: n}) for n in args.points or SWEEPS[args.sweep]]
    for point in points:
        point.refuse()
    return points


def merge(settings: Settings, found: dict[str, dict], limits: dict[str, float]) -> dict[str, Any]:
    """One point: {"ratio", "product_s", "trl_s", "floor_s", "floor_parts_s", a key a side, "settings"}."""
    lengths = {side: one["prompt_tokens"] for side, one in found.items() if "error" not in one}
    if len(set(lengths.values())) > 1:
        raise RuntimeError(f"the sides were given prompts of different lengths: {lengths}")
    point = {
        "ratio": ratio(found, "update_s"),
        "processor_ratio": ratio(found, "processor_s"),
        **{f"{side}_s": found.get(side, {}).get("update_s") for side in SIDES},
        "floor_s": None,
        **found,
        "settings": described(settings),
        "ceilings": limits,
    }
    if lengths:
        parts = floor(settings, min(lengths.values()), limits)
        point |= {"floor_s": parts.pop("update_s"), "floor_parts_s": parts}
    return point


def ratio(found: dict[str, dict], key: str) -> float | None:
    """TRL's over the product's, where both are known."""
    trl, product = (found.get(side, {}).get(key) for side in ("trl", "product"))
    return trl / product if trl and product else None


def described(settings: Settings) -> dict[str, Any]:
    values = asdict(settings) | {"prompts_per_row": settings.row_prompts()}
    del values["folder"]  # a place on this machine
    return values


def measure(args: argparse.Namespace) -> dict[str, Any] | list[dict[str, Any]]:
    """All that was asked for. A sweep writes its points behind each side: a lost machine loses one side."""
    points = points_of(args)
    make_material(points)
    origin = provenance(points[0], args.commit)
    if args.selfcheck:
        found = measure_side(points, "selfcheck")
        return [
            {"selfcheck": one, "settings": described(settings), **origin}
            for settings, one in zip(points, found, strict=True)
        ]
    if args.token_weights:
        found = measure_side(points, "weights")[0]
        return {"weights": found, "settings": described(points[0]), **origin}
    if args.flat:
        found = measure_side(points, "flat")[0]
        thirds = flat_thirds(found["updates"]) if "updates" in found else {}
        return {"flat": found | thirds, "settings": described(points[0]), **origin}
    limits = measure_ceilings(points[0])
    before = json.loads(Path(args.json).read_text()) if args.sweep and keeps(args.json) else []
    sides: dict[str, list[dict]] = {}
    result = []
    for side in (args.only,) if args.only else SIDES:
        sides[side] = measure_side(points, side)
        found = [{name: of[i] for name, of in sides.items()} for i in range(len(points))]
        merged = [merge(*one, limits) for one in zip(points, found, strict=True)]
        result = [{"sweep": args.sweep, **point, **origin} for point in merged]
        if args.sweep and args.json != "-":
            write(before + result, args.json)
    return before + result if args.sweep else result[0]


def keeps(file: str | None) -> bool:
    return bool(file) and file != "-" and Path(file).exists()


def write(result: Any, to: str | None) -> None:
    text = json.dumps(result, indent=2)
    if to == "-":
        print(text)
    elif to:
        Path(to).write_text(text + "\n")


def errors(result: dict[str, Any] | list[dict[str, Any]]) -> Sequence[str]:
    points = result if isinstance(result, list) else [result]
    kinds = (*SIDES, "weights", "flat", "selfcheck")
    return [point[kind]["error"] for point in points for kind in kinds if "error" in point.get(kind, {})]


def main() -> None:
    args = parse()
    if args.table:
        print(table(json.loads(Path(args.table).read_text())))
        return
    try:
        result = measure(args)
    except ValueError as refusal:
        sys.exit(f"step.py: {refusal}")
    write(result, args.json)
    if args.json != "-":
        print(terminal(result))
    if any("code" in error for error in errors(result)):
        sys.exit("step.py: a process failed; what it said stands above")


if __name__ == "__main__":
    main()
