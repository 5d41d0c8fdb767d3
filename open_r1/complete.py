"""Trainer checkpoints: OUT/checkpoint-STEP comes there in one step, and is whole as its marker says."""

import json
import os
import shutil
from pathlib import Path

from .checkpoint import fsync, fsync_tree, write_atomically

COMPLETE = "COMPLETE"
SAVING = ".saving"  # in OUT: checkpoints that are being written or deleted, by this run or a killed one


def mark_complete(folder: str | Path, info: dict) -> None:
    """Call it on one rank, once all have written their files. `info` has at least "step" and "world_size"."""
    folder = Path(folder)
    fsync_tree(folder)
    marker = {"step": info["step"], "world_size": info["world_size"], **info, "files": _sizes(folder)}
    write_atomically(folder / COMPLETE, json.dumps(marker, indent=2).encode())


def publish(folder: Path, out_dir: Path, info: dict) -> None:
    """OUT/.saving/checkpoint-STEP, which all ranks have written, becomes OUT/checkpoint-STEP.

    One that this run wrote before is replaced; whatever else has that name is moved to a free one.
    """
    mark_complete(folder, info)
    target = out_dir / folder.name
    if target.exists():
        if (_read_marker(target) or {}).get("run") == info.get("run"):
            os.rename(target, folder.with_name("replaced"))
        else:
            move_aside(target)
    os.rename(folder, target)
    fsync(out_dir)


def move_aside(folder: Path) -> Path:
    """Give it a free name that no run looks for."""
    names = (folder.with_name(f"{folder.name}.aside{n or ''}") for n in range(1000))
    return folder.rename(next(path for path in names if not path.exists()))


def newest_complete(out_dir: str | Path) -> tuple[Path, dict] | None:
    """The whole checkpoint of the highest step, and its `info`. Newer ones are named and skipped."""
    for folder in sorted(Path(out_dir).glob("checkpoint-*"), key=_step, reverse=True):
        if _step(folder) >= 0:
            fault = checkpoint_fault(folder)
            if fault is None:
                return folder, complete_marker(folder)
            print(f"{folder} is skipped: {fault}.", flush=True)
    return None


def complete_marker(folder: str | Path) -> dict | None:
    """The `info` that mark_complete was given; None for a checkpoint that is not whole."""
    info = _read_marker(Path(folder))
    if info is None or checkpoint_fault(folder):
        return None
    del info["files"]
    return info


def checkpoint_fault(folder: str | Path) -> str | None:
    """Why a run cannot go on from `folder`; None when it can."""
    marker = _read_marker(Path(folder))
    if marker is None:
        return f"it is not complete ({COMPLETE}, written last, is missing or of another checkpoint)"
    sizes = _sizes(Path(folder))
    for name, size in marker["files"].items():
        if sizes.get(name) != size:
            return f"{name} has {sizes[name]:,} of {size:,} bytes" if name in sizes else f"{name} is missing"
    return None


def own_checkpoints(out_dir: str | Path, run: str | None) -> list[Path]:
    """The whole checkpoints that this run wrote, the oldest first. Copies under another name, and folders
    without our marker or with another run's, are somebody's."""
    folders = [path for path in Path(out_dir).glob("checkpoint-*") if checkpoint_fault(path) is None]
    return sorted((path for path in folders if _read_marker(path).get("run") == run), key=_step)


def prune(out_dir: str | Path, run: str | None = None, keep: int = 2) -> None:
    """Delete what this run wrote but its `keep` newest whole checkpoints. Call it only after a success."""
    for folder in own_checkpoints(out_dir, run)[:-keep]:
        discard(folder)


def discard(folder: Path) -> None:
    """Delete a checkpoint of ours. It leaves its place in one step, and is never half of one there."""
    clear_saving(folder.parent)
    (folder.parent / SAVING).mkdir()
    os.rename(folder, folder.parent / SAVING / "discarded")
    clear_saving(folder.parent)


def clear_saving(out_dir: Path) -> None:
    shutil.rmtree(out_dir / SAVING, ignore_errors=True)


def _step(folder: Path) -> int:
    number = folder.name.removeprefix("checkpoint-")
    return int(number) if number.isdecimal() else -1


def _read_marker(folder: Path) -> dict | None:
    """What mark_complete wrote for this very folder; None without it, for a copy under another name, and for
    what somebody else calls so."""
    try:
        marker = json.loads((folder / COMPLETE).read_bytes())
    except (OSError, ValueError):
        return None
    ours = isinstance(marker, dict) and {"step", "world_size", "files"} <= marker.keys()
    return marker if ours and marker["step"] == _step(folder) else None


def _sizes(folder: Path) -> dict[str, int]:
    files = (file for file in folder.rglob("*") if file.is_file() and COMPLETE not in file.name)
    return {file.relative_to(folder).as_posix(): file.stat().st_size for file in sorted(files)}
