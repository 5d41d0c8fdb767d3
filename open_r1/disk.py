"""Is there room? Asked before the first update and before each save."""

import os
import shutil
from pathlib import Path

from .checkpoint import tensor_slots, weight_files

MARGIN = 1.02  # of what is asked for: logs, processor files, the blocks of a file system


def model_bytes(folder: Path) -> int:
    """Bytes of a model's weight files."""
    return sum((folder / file).stat().st_size for file in weight_files(folder))


def checkpoint_bytes(base: Path, deepspeed: bool) -> int:
    """Expected bytes of a checkpoint of a policy made from `base`: float32 weights and AdamW's two moments
    are 12 a parameter; DeepSpeed's have the gathered 16-bit weights too, and padding: 16."""
    sizes = (places[0].shape for places in tensor_slots(base).values())
    return (16 if deepspeed else 12) * sum(_product(shape) for shape in sizes)


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


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total
