"""Reads a GGUF file: what it says of a model, and its tensors as float32 (those of F32, Q4_1 and Q8_0)."""

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, LIST = 8, 9
BLOCK = 32  # numbers that share a scale
F32, Q4_1, Q8_0 = 0, 3, 8
BYTES = {F32: 4 * BLOCK, Q4_1: 20, Q8_0: 34}  # of a block


class GGUF:
    """`about` has the file's own names: llama.block_count, tokenizer.ggml.tokens, …"""

    def __init__(self, path: Path):
        self.bytes, self.at = np.memmap(path, np.uint8, "r"), 0
        if self._take(4).tobytes() != b"GGUF":
            raise ValueError(f"{path} is no GGUF file")
        self._number("I")  # the format's version
        tensors, facts = self._number("Q"), self._number("Q")
        self.about: dict[str, Any] = {self._text(): self._value(self._number("I")) for _ in range(facts)}
        self.tensors = {}  # name -> shape, kind, place behind the header
        for _ in range(tensors):
            name = self._text()
            shape = [self._number("Q") for _ in range(self._number("I"))][::-1]
            self.tensors[name] = (shape, self._number("I"), self._number("Q"))
        alignment = self.about.get("general.alignment", 32)
        self.data = -(-self.at // alignment) * alignment

    def tensor(self, name: str) -> Tensor:
        shape, kind, place = self.tensors[name]
        if kind not in BYTES:
            raise ValueError(f"tensor {name} is of kind {kind}; only F32, Q4_1 and Q8_0 are read")
        count = math.prod(shape)
        self.at = self.data + place
        return dequantized(kind, self._take(count * BYTES[kind] // BLOCK)).reshape(shape)

    def _take(self, count: int) -> np.ndarray:
        self.at += count
        return self.bytes[self.at - count : self.at]

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")).tobytes())[0]

    def _text(self) -> str:
        return self._take(self._number("Q")).tobytes().decode()

    def _value(self, kind: int) -> Any:
        if kind == TEXT:
            return self._text()
        if kind == LIST:
            kind, count = self._number("I"), self._number("Q")
            return [self._value(kind) for _ in range(count)]
        return self._number(NUMBERS[kind])


def dequantized(kind: int, stored: np.ndarray) -> Tensor:
    """The numbers behind whole blocks of bytes."""
    if kind == F32:
        return torch.from_numpy(stored.view("<f4").copy())
    blocks = stored.reshape(-1, BYTES[kind])
    if kind == Q8_0:  # a scale, and 32 signed bytes
        numbers = blocks[:, 2:].view(np.int8) * scales(blocks[:, :2])
    else:  # a scale and a minimum, and the first 16 numbers in the low halves of 16 bytes
        scale, lowest = np.split(scales(blocks[:, :4]), 2, axis=1)
        numbers = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1) * scale + lowest
    return torch.from_numpy(numbers.flatten())


def scales(stored: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(stored).view("<f2").astype(np.float32)
