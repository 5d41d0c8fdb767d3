"""Is there room? Asked before the first update and before each save."""

import os
import shutil
from pathlib import Path

from .checkpoint import weight_files

MARGIN = 1.02  # of what is asked for: logs, processor files, the blocks of a file system


def model_bytes(folder: Path) -> int:
    """Bytes of a model's weight files."""
    return sum((folder / file).stat().st_size for file in weight_files(folder))


def checkpoint_bytes(saved: int, trained: int, deepspeed: bool) -> int:
    """Expected bytes of a checkpoint of so many parameters: 4 for each in float32, and 8 for AdamW's two
    moments of what is trained; DeepSpeed's have the gathered 16-bit weights too, and padding: 4 more."""
    return (8 if deepspeed else 4) * saved + 8 * trained


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def shortage(needs: list[tuple[Path, int, str]], margin: float = MARGIN) -> str | None:
    """`needs` are (folder, bytes, what for). None when there is room for all of them together, else one
    sentence about a disk that is too small: what lies on the same disk is added up."""
    disks: dict[int, list[tuple[Path, int, str]]] = {}
    for folder, size, what in needs:
        disks.setdefault(existing(folder).stat().st_dev, []).append((folder, size, what))
    for wanted in disks.values():
        place, total = existing(wanted[0][0]), sum(size for _, size, _ in wanted)
        free = free_bytes(place)
        if free < total * margin:
            parts = " and ".join(f"{size / 1e9:.2f} GB for {what}" for _, size, what in wanted if size)
            return f"the disk of {place} has {free / 1e9:.2f} GB free and needs {parts}"
    return None


def free_bytes(folder: Path) -> int:
    """Of the disk that the folder lies on, or will lie on."""
    return shutil.disk_usage(existing(folder)).free


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = Path(os.path.abspath(folder))
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))
