"""Weighted sums of models, tensor by tensor: averages (model soups, Wortsman et al., arXiv 2203.05482) and
interpolations towards the base (WiSE-FT, arXiv 2109.01903).

Everything is summed in float32 and rounded once, by whoever takes the result: in bfloat16 an update of a
weight is often smaller than half of its last place, and a mixture then rounds onto an end point.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint import Slot, file_fault, fsync, read_header, temporary, tensor_slots

CHUNK = 2**22  # values that are read at once: 16 MB in float32


class Weights:
    """The parameters of a model by the module's names, in its folder or in one file of `write_masters`;
    read when they are asked for. Raises ValueError for files that are not whole."""

    def __init__(self, source: Path):
        self.source, self.folder = source, source if source.is_dir() else source.parent
        self.metadata: dict[str, str] = {}
        if source.is_dir():
            self.slots = {name: places[0] for name, places in tensor_slots(source).items()}
        else:
            if fault := file_fault(source):
                raise ValueError(fault)
            header, entries = read_header(source)
            self.metadata = json.loads(header[8:]).get("__metadata__", {})
            self.slots = {
                name: Slot(
                    source.name, len(header) + one["data_offsets"][0], tuple(one["shape"]), torch.float32
                )
                for name, one in entries.items()
            }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: slot.shape for name, slot in self.slots.items()}

    def add_to(self, total: Tensor, name: str, weight: float) -> None:
        """total += weight x parameter, in float32, a chunk at a time."""
        slot = self.slots[name]
        with open(self.folder / slot.file, "rb") as file:
            file.seek(slot.start)
            chunk = torch.empty(min(CHUNK, total.numel()), dtype=slot.dtype)
            for part in total.view(-1).split(CHUNK):
                values = chunk[: part.numel()]
                file.readinto(values.view(torch.uint8).numpy())
                part.add_(values.float(), alpha=weight)


def mix(parts: Sequence[tuple[Weights, float]]) -> Iterator[tuple[str, Tensor]]:
    """The weighted sum of models, one (name, float32 tensor) at a time.

    In memory are one sum and a chunk of one summand. Raises ValueError for models of different shapes.
    """
    first = parts[0][0]
    for other, _ in parts[1:]:
        if other.shapes() != first.shapes():
            raise ValueError(f"{other.source} and {first.source} have not the same tensors: they do not mix.")
    for name, shape in first.shapes().items():
        total = torch.zeros(shape)
        for model, weight in parts:
            model.add_to(total, name, weight)
        yield name, total


def write_masters(
    path: Path,
    shapes: dict[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, Tensor]],
    metadata: dict[str, str],
) -> None:
    """A safetensors file of these float32 parameters, whole or not there; `tensors` come one at a time.

    Raises ValueError for a parameter that is missing, unknown, repeated or of another shape or dtype, OSError
    where it cannot be written.
    """
    entries, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps({"__metadata__": metadata, **entries}).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8, as in safetensors
    path.parent.mkdir(parents=True, exist_ok=True)
    missing, part = set(shapes), temporary(path)
    try:
        with open(part, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for name, tensor in tensors:
                if name not in missing or tensor.dtype != torch.float32 or tensor.shape != shapes[name]:
                    raise ValueError(f"{name} came as {tensor.dtype} {list(tensor.shape)}, or twice.")
                missing.remove(name)
                file.seek(8 + len(text) + entries[name]["data_offsets"][0])
                file.write(memoryview(tensor.contiguous().view(-1).numpy()).cast("B"))
        if missing:
            raise ValueError(f"{len(missing)} parameters got no values, first {min(missing)}.")
        fsync(part)
        os.replace(part, path)
        fsync(path.parent)
    finally:
        part.unlink(missing_ok=True)
