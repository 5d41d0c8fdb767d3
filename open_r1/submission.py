"""The submission: the base model's own files, byte for byte, with only the values of its tensors changed.

At every moment one whole model stands in the folder. A new one is written beside it, loaded once to be sure,
and takes its place in one step (install.py); its record, `<submission>.record.json`, goes with it.
"""

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint import (
    HEAD,
    INDEX,
    SINGLE,
    Slot,
    file_fault,
    is_finite,
    is_valid_model,
    read_header,
    refuse_other_kinds,
    tensor_slots,
    weight_files,
)
from .disk import model_bytes, shortage
from .install import (
    FOUND,
    fingerprint,
    holds_something,
    install,
    read_record,
    refuse_without_links,
    staging_folder,
    tidy,
    write_record,
)

# Other weight files of the base stay behind: they would hold the old values.
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


def ensure_submission(base: str | Path, submission: str | Path) -> bool:
    """See to it that a valid model stands in `submission`: the base, unless one of its architecture does.

    True when one did: it is kept, and is the one to beat. Raises ValueError when the folder holds anything
    else, is the base's own, or lies where a new model beside the old one does not fit or cannot be written.
    """
    base, submission = Path(base).resolve(), Path(submission).resolve()
    refuse_place(base, submission)
    tidy(submission)
    stands = holds_something(submission)
    submission.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(submission.parent, os.W_OK):
        raise ValueError(f"{submission.parent} cannot be written; set SUBMISSION to a folder elsewhere.")
    refuse_without_links(submission)
    if fault := _shortage(base, submission, copies=1 if stands else 2):
        raise ValueError(f"{fault}; make room or set SUBMISSION to a folder on a larger disk.")
    if stands:
        if fault := is_valid_model(submission) or header_fault(base, submission):
            raise ValueError(_left_alone(submission, fault))
        return True
    try:
        with staging_folder(submission) as new:
            _copy_companions(base, new)
            for file in weight_files(base):
                shutil.copyfile(base / file, new / file)
            _load_once(new, submission)
            install(new, submission, {"recipe": "base", "step": 0})
    except OSError as error:  # a quota, say, which free space tells nothing about
        raise ValueError(f"{submission} cannot be written ({error}); set SUBMISSION elsewhere.") from error
    return False


def refuse_place(base: Path, submission: Path) -> None:
    """Raise ValueError where no submission may stand, as headers tell. Nothing is loaded or written."""
    base, submission = base.resolve(), submission.resolve()
    if base == submission or base in submission.parents or submission in base.parents:
        raise ValueError(f"SUBMISSION {submission} would overwrite the base model {base}; set it elsewhere.")
    if os.path.exists(submission) and not submission.is_dir():
        raise ValueError(f"SUBMISSION {submission} is not a folder; set it to a new or empty folder.")
    if holds_something(submission) and (fault := header_fault(base, submission)):
        raise ValueError(_left_alone(submission, fault))


def header_fault(base: Path, submission: Path) -> str | None:
    """Why the folder holds no whole model with the base's tensors, as headers tell; None when it does."""
    try:
        refuse_other_kinds(submission)
        for file in weight_files(submission):
            if fault := file_fault(submission / file):
                return fault
        return None if _shapes(submission) == _shapes(base) else f"its tensors are not those of {base}"
    except ValueError as error:
        return str(error)


def _left_alone(submission: Path, fault: str) -> str:
    return (
        f"SUBMISSION {submission} holds something that is no valid model like the base "
        f"({fault.rstrip('.')}), and is left alone; set it to a new or empty folder."
    )


def write_submission(
    base: str | Path, submission: str | Path, tensors: Iterable[tuple[str, Tensor]], record: dict
) -> None:
    """Replace the submission by the base with these values; `record` tells score, rows, step and recipe.

    `tensors` yields every parameter once, as (name in the module, float32 tensor), and is run to its end even
    when something fails: to gather a parameter is collective, and the other ranks would hang.
    Raises ValueError, and leaves the old submission as it was, for a value that is not finite, a parameter
    that is missing, unknown, repeated, or of another shape or dtype, and for a model that does not load; and
    OSError where it cannot be written (a full disk).
    """
    base, submission = Path(base).resolve(), Path(submission).resolve()
    tensors = iter(tensors)
    try:
        tidy(submission)
        if fault := _shortage(base, submission, copies=1):
            raise OSError(errno.ENOSPC, fault)
        with staging_folder(submission) as new:
            _copy_companions(base, new)
            _write_tensors(base, new, tensors)
            _load_once(new, submission)
            install(new, submission, record)
    except Exception:
        for _ in tensors:
            pass
        raise


def note_score(submission: str | Path, **measured) -> None:
    """Add what was measured of the model that stands there to its record."""
    submission = Path(submission).resolve()
    record = (read_record(submission) or {"recipe": FOUND}) | measured
    write_record(submission, record, fingerprint(submission))


# The tensors


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    return {name: places[0].shape for name, places in tensor_slots(folder).items()}


def _write_tensors(base: Path, new: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write the base's weight files with other values: headers as they are, each tensor in its place."""
    slots = tensor_slots(base)
    files = {name: open(new / name, "wb") for name in weight_files(base)}
    try:
        for name, file in files.items():
            file.write(read_header(base / name)[0])
            file.truncate((base / name).stat().st_size)
        missing = set(slots)
        for name, tensor in tensors:
            if name == HEAD and HEAD not in slots:
                continue  # tied: its values arrive as the embedding's
            if name not in missing:
                raise ValueError(f"{name} {'came twice' if name in slots else f'is no parameter of {base}'}.")
            missing.remove(name)
            for slot in slots[name]:
                file = files[slot.file]
                file.seek(slot.start)
                file.write(_rounded_bytes(name, tensor, slot))
        if missing:
            raise ValueError(f"{len(missing)} parameters of {base} got no values, first {min(missing)}.")
    finally:
        for file in files.values():
            file.close()


def _rounded_bytes(name: str, tensor: Tensor, slot: Slot) -> memoryview:
    if tensor.dtype != torch.float32 or tuple(tensor.shape) != slot.shape:
        came = f"{tensor.dtype} {list(tensor.shape)}"
        raise ValueError(f"{name} came as {came}, not torch.float32 {list(slot.shape)}.")
    values = tensor.detach().to("cpu", slot.dtype).contiguous()  # the one rounding
    if not is_finite(values):
        raise ValueError(f"{name} has values that are not finite as {slot.dtype}.")
    return memoryview(values.reshape(-1).view(torch.uint8).numpy())


# The folders


def _shortage(base: Path, submission: Path, copies: int) -> str | None:
    size = copies * model_bytes(base)
    places = {submission.parent, submission}  # two disks, where the submission is a mount point
    return next(filter(None, (shortage([(place, size, "the submission")]) for place in places)), None)


def _load_once(new: Path, submission: Path) -> None:
    fault = is_valid_model(new)
    if fault:
        raise ValueError(f"The new model does not load, and {submission} stays as it was: {fault}")


def _copy_companions(base: Path, new: Path) -> None:
    """Copy what is no weights: configurations, tokenizer, processor, chat template, index, licence."""
    sharded = weight_files(base) != [SINGLE]
    for path in base.iterdir():
        index_of_others = path.name.endswith(".index.json") and not (sharded and path.name == INDEX)
        if path.is_file() and path.suffix not in WEIGHT_SUFFIXES and not index_of_others:
            shutil.copyfile(path, new / path.name)
