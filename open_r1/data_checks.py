"""Which rows can be trained on: bad ones are found and named, and those of the validation sets left out.

Texts, solutions and image headers take seconds, so they come before the first step. Decoding every image
takes minutes: BackgroundDecode does it beside the first updates, check_rows(full=True) before them.
"""

import functools
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from transformers import Qwen2VLProcessor

from open_r1.data import CountingData
from open_r1.data_loader import leave_process_group
from open_r1.images import DataError, check_header, decode
from open_r1.processor import (
    is_main_process,
    refuse_long_prompt,
    refuse_special_tokens,
    smallest_side,
)

CHUNK = 128  # rows a worker process answers for at a time
END = 4096  # bytes of a file's start and end in its fingerprint


@dataclass(frozen=True)
class BadRow:
    index: int  # of the row in its data set
    reason: str


# --- Bad rows


def check_rows(
    data: CountingData,
    processor: Qwen2VLProcessor,
    *,
    rows: Sequence[int] | None = None,
    full: bool = False,
    num_workers: int = 4,
) -> list[BadRow]:
    """Those of `rows` (default: all) that cannot be trained on. With `full`, all images are decoded."""
    rows = range(len(data)) if rows is None else rows
    name = f"{'decoding' if full else 'checking'} {data.source}"
    reasons = map_rows(_row_check(data, processor, full), rows, num_workers, name)
    return [BadRow(row, reason) for row, reason in reasons if reason]


class BackgroundDecode:
    """check_rows(full=True) in `num_workers` processes of low priority, while the caller goes on.

    Make it before CUDA work and threads begin: its processes are forked. 0 workers decode in a thread.
    """

    def __init__(
        self,
        data: CountingData,
        processor: Qwen2VLProcessor,
        *,
        rows: Sequence[int] | None = None,
        num_workers: int = 1,
    ):
        self._bad: list[BadRow] = []
        self._error: Exception | None = None
        self._stop = threading.Event()
        rows = range(len(data)) if rows is None else rows
        reasons = map_rows(_row_check(data, processor, True), rows, num_workers, None)
        self._thread = threading.Thread(target=self._collect, args=(reasons,), daemon=True)
        self._thread.start()

    def _collect(self, reasons: Iterator[tuple[int, str | None]]) -> None:
        try:
            for row, reason in reasons:
                if reason:
                    self._bad.append(BadRow(row, reason))
                if self._stop.is_set():
                    break
        except Exception as error:  # a thread's exception would be lost; poll raises it
            self._error = error.with_traceback(None)  # or it would keep the loader alive

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def poll(self) -> list[BadRow]:
        """The bad rows found so far. Raises what stopped the decoding, if something did."""
        if self._error is not None:
            raise DataError(f"decoding in the background stopped: {self._error}") from self._error
        return list(self._bad)

    def result(self) -> list[BadRow]:
        """All bad rows, once the last is decoded."""
        self._thread.join()
        return self.poll()

    def close(self) -> None:
        """Give up what is left."""
        self._stop.set()
        self._thread.join()


def good_rows(
    data: CountingData, bad: Sequence[BadRow], *, skip_bad_rows: bool, out: str | Path
) -> list[int]:
    """The rows that are left. With `skip_bad_rows`, the bad ones are listed in out/bad_rows.jsonl.

    Raises DataError with the first ten when there are any that are not to be skipped, or when none is left.
    """
    if bad and not skip_bad_rows:
        shown = "".join(f"\n  row {one.index}: {one.reason}" for one in bad[:10])
        more = f"\n  and {len(bad) - 10} more" if len(bad) > 10 else ""
        raise DataError(
            f"{len(bad)} of the {len(data)} rows of {data.source} cannot be used:{shown}{more}\n"
            "Repair them, or leave them out with --skip_bad_rows."
        )
    if bad and is_main_process():
        Path(out).mkdir(parents=True, exist_ok=True)
        with open(Path(out) / "bad_rows.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"row": one.index, "reason": one.reason}) + "\n" for one in bad)
    left_out = {one.index for one in bad}
    kept = [row for row in range(len(data)) if row not in left_out]
    if not kept:
        raise DataError(f"no row of {data.source} can be used")
    return kept


def _row_check(data: CountingData, processor: Qwen2VLProcessor, full: bool) -> Callable[[int], str | None]:
    return functools.partial(_fault, data, processor, smallest_side(processor), full)


def _fault(
    data: CountingData, processor: Qwen2VLProcessor, min_side: int, full: bool, row: int
) -> str | None:
    """Why a row cannot be trained on; None when it can."""
    try:
        question = data.columns(row)["question"]
        refuse_special_tokens(question, processor)
        if "<image>" in question:
            return "the question holds '<image>', but images always stand before the question: remove it"
        sizes = []
        for file in data.open_images(row):
            sizes.append(check_header(file, min_side))
            if full:
                file.seek(0)
                decode(file)
        refuse_long_prompt(question, sizes, processor)
    except DataError as error:
        return str(error)
    return None


# --- Overlap with validation


def refuse_same_folder(train: CountingData, validation: Sequence[CountingData]) -> None:
    """Raise DataError when the training rows are read from a validation set's files, or are a copy of it."""
    for one in validation:
        same_content = train.fingerprint is not None and train.fingerprint == one.fingerprint
        if train.files & one.files or same_content:
            raise DataError(f"{train.source} is the validation set {one.source}: train on another folder")


def drop_overlap(
    train: CountingData,
    validation: Sequence[CountingData],
    *,
    rows: Sequence[int] | None = None,
    num_workers: int = 4,
) -> tuple[list[int], int]:
    """The training rows (of `rows`, default: all) that share no image with validation, and how many do.

    Two images are the same when their files have one length and the same first and last 4 KiB. Raises
    DataError when no row is left.
    """
    rows = range(len(train)) if rows is None else rows
    seen: set[bytes] = set()
    for one in validation:
        prints = map_rows(functools.partial(_fingerprints, one), range(len(one)), num_workers, None)
        seen.update(digest for _, digests in prints for digest in digests)
    name = "comparing with validation"
    prints = map_rows(functools.partial(_fingerprints, train), rows, num_workers, name)
    kept = [row for row, digests in prints if seen.isdisjoint(digests)]
    if not kept:
        raise DataError(f"every row of {train.source} shares an image with validation")
    return kept, len(rows) - len(kept)


def _fingerprints(data: CountingData, row: int) -> list[bytes]:
    return [_fingerprint(file) for file in data.open_images(row)]


def _fingerprint(file: BinaryIO) -> bytes:
    length = file.seek(0, os.SEEK_END)
    file.seek(0)
    start = file.read(END)
    file.seek(max(0, length - END))
    return hashlib.blake2b(b"%d " % length + start + file.read(), digest_size=16).digest()


# --- Many rows in several processes


class _Chunks(Dataset):
    def __init__(self, function: Callable[[int], Any], rows: Sequence[int]):
        self.function, self.rows = function, rows

    def __len__(self) -> int:
        return -(-len(self.rows) // CHUNK)

    def __getitem__(self, chunk: int) -> list[tuple[int, Any]]:
        rows = self.rows[chunk * CHUNK : (chunk + 1) * CHUNK]
        return [(row, self.function(row)) for row in rows]


def map_rows(
    function: Callable[[int], Any], rows: Sequence[int], num_workers: int, name: str | None
) -> Iterator[tuple[int, Any]]:
    """(row, function(row)) for each row, in order. The processes start at once; `name` is that of a bar."""
    chunks = _Chunks(function, rows)
    loader = DataLoader(
        chunks,
        batch_size=None,
        num_workers=min(num_workers, len(chunks), len(os.sched_getaffinity(0))),
        worker_init_fn=_stand_back,
        generator=torch.Generator(),  # a loader draws a seed, and that must not move training's numbers
    )
    hidden = name is None or not is_main_process()
    bar = tqdm(total=len(rows), desc=name, unit="row", delay=1, leave=False, disable=hidden)
    return _one_by_one(iter(loader), bar)


def _one_by_one(chunks: Iterator[list[tuple[int, Any]]], bar: tqdm) -> Iterator[tuple[int, Any]]:
    with bar:
        for chunk in chunks:
            bar.update(len(chunk))
            yield from chunk


def _stand_back(worker: int) -> None:
    leave_process_group(worker)
    os.nice(10)
