"""The submission: the base model's own files, byte for byte, with only the values of its tensors changed.

At every moment one whole model stands in the folder. A new one is written beside it, loaded once to be sure,
and exchanged with it in one step; its record, `<submission>.record.json`, follows.
"""

import ctypes
import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint import (
    HEAD,
    INDEX,
    SINGLE,
    Slot,
    fsync,
    is_valid_model,
    read_header,
    tensor_slots,
    weight_files,
    write_atomically,
)

# Other weight files of the base stay behind: they would hold the old values.
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
UNFILLED = ".unfilled"  # in a folder that held nothing, while the base is copied into it


def ensure_submission(base: str | Path, submission: str | Path) -> bool:
    """See to it that a valid model stands in `submission`: the base, unless one of its architecture does.

    True when one did: it is kept, and is the one to beat. Raises ValueError when the folder holds anything
    else, is the base's own, or lies where a new model beside the old one does not fit or cannot be written.
    """
    base, submission = Path(base).resolve(), Path(submission).resolve()
    if base == submission or base in submission.parents or submission in base.parents:
        raise ValueError(f"SUBMISSION {submission} would overwrite the base model {base}; set it elsewhere.")
    if submission.exists() and not submission.is_dir():
        raise ValueError(f"SUBMISSION {submission} is not a folder; set it to a new or empty folder.")
    stands = holds_something(submission)
    _check_room(base, submission, copies=1 if stands else 2)
    if stands:
        fault = is_valid_model(submission)
        if fault is None and _shapes(submission) != _shapes(base):
            fault = f"its tensors are not those of {base}"
        if fault:
            raise ValueError(
                f"SUBMISSION {submission} holds something that is no valid model like the base "
                f"({fault.rstrip('.')}), and is left alone; set it to a new or empty folder."
            )
        return True
    with _staging_folder(submission) as new:
        _copy_companions(base, new)
        for file in weight_files(base):
            shutil.copyfile(base / file, new / file)
        _install(new, submission)
        _write_record(submission, {"recipe": "base", "step": 0})
    return False


def write_submission(
    base: str | Path, submission: str | Path, tensors: Iterable[tuple[str, Tensor]], record: dict
) -> None:
    """Replace the submission by the base with these values; `record` tells score, rows, step and recipe.

    `tensors` yields every parameter once, as (name in the module, float32 tensor), and is run to its end even
    when something fails: to gather a parameter is collective, and the other ranks would hang.
    Raises ValueError, and leaves the old submission as it was, for a value that is not finite, a parameter
    that is missing, unknown, repeated, or of another shape or dtype, and for a model that does not load.
    """
    base, submission = Path(base).resolve(), Path(submission).resolve()
    tensors = iter(tensors)
    try:
        with _staging_folder(submission) as new:
            _copy_companions(base, new)
            _write_tensors(base, new, tensors)
            _install(new, submission)
            _write_record(submission, record)
    except Exception:
        for _ in tensors:
            pass
        raise


def record_path(submission: str | Path) -> Path:
    submission = Path(submission).resolve()
    return submission.with_name(f"{submission.name}.record.json")


def read_record(submission: str | Path) -> dict | None:
    """The record of the model that stands there; None without one, or when it is about other weights."""
    try:
        record = json.loads(record_path(submission).read_bytes())
        return record if record.pop("weights") == _fingerprint(Path(submission)) else None
    except (OSError, ValueError, KeyError):
        return None


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
    if not torch.isfinite(values).all():
        raise ValueError(f"{name} has values that are not finite as {slot.dtype}.")
    return memoryview(values.reshape(-1).view(torch.uint8).numpy())


# The folders


def holds_something(submission: Path) -> bool:
    """False for a folder that is missing, empty but for hidden files and lost+found, or was never filled."""
    if not submission.is_dir() or (submission / UNFILLED).exists():
        return False
    return any(not _is_left_alone(entry.name) for entry in submission.iterdir())


def _is_left_alone(name: str) -> bool:
    return name.startswith(".") or name == "lost+found"


def _check_room(base: Path, submission: Path, copies: int) -> None:
    submission.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(submission.parent, os.W_OK):
        raise ValueError(f"{submission.parent} cannot be written; set SUBMISSION to a folder elsewhere.")
    need = copies * sum((base / file).stat().st_size for file in weight_files(base))
    for place in (submission.parent, submission):  # two disks, where the submission is a mount point
        free = shutil.disk_usage(place).free if place.exists() else need
        if free < need:
            raise ValueError(
                f"{place} has {free / 1e9:.1f} GB free and {need / 1e9:.1f} GB are needed; "
                "make room or set SUBMISSION to a folder on a larger disk."
            )


@contextmanager
def _staging_folder(submission: Path) -> Iterator[Path]:
    """A folder of ours beside the submission, for a new model, and after the exchange for the old one."""
    staging = submission.with_name(f".{submission.name}.new")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _copy_companions(base: Path, new: Path) -> None:
    """Copy what is no weights: configurations, tokenizer, processor, chat template, index, licence."""
    sharded = weight_files(base) != [SINGLE]
    for path in base.iterdir():
        index_of_others = path.name.endswith(".index.json") and not (sharded and path.name == INDEX)
        if path.is_file() and path.suffix not in WEIGHT_SUFFIXES and not index_of_others:
            shutil.copyfile(path, new / path.name)


def _install(new: Path, submission: Path) -> None:
    """Put the model `new` in the submission's place, in one step.

    A model that stood there and was not written here, or has notes in it, is kept as `<submission>.previous`.
    """
    fault = is_valid_model(new)
    if fault:
        raise ValueError(f"The new model does not load, and {submission} stays as it was: {fault}")
    for entry in (*new.iterdir(), new):
        fsync(entry)
    if not holds_something(submission):
        try:
            os.rename(new, submission)  # an empty folder is replaced as well
        except OSError:  # a mount point, or hidden files in it
            (submission / UNFILLED).touch()
            _replace_in_place(new, submission)
            (submission / UNFILLED).unlink()
    else:
        ours = read_record(submission) is not None
        extras = _extras(submission, new) if ours else set()
        previous = _free_name(submission)
        beside = new if ours and not extras else new.rename(previous)
        try:
            _exchange(beside, submission)
        except OSError:  # a mount point, or a file system without the call
            beside.rename(new)
            if not ours or not all(map(_is_left_alone, extras)):
                shutil.copytree(submission, previous, ignore=shutil.ignore_patterns("lost+found"))
            _replace_in_place(new, submission)
    fsync(submission.parent)


def _exchange(one: Path, other: Path) -> None:
    """Let two paths change places in one step. OSError where the system cannot do it."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.ENOSYS, "renameat2 is missing")
    at_cwd, rename_exchange = -100, 2
    if renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), rename_exchange) != 0:
        raise OSError(ctypes.get_errno(), "renameat2 refused", str(other))


def _replace_in_place(new: Path, submission: Path) -> None:
    """Switch the model inside a folder, by a change of one name: the index's, or the single weight file's.

    Shards come under names that the standing index does not use, so that they are nobody's until the switch.
    Whatever is not of the new model is deleted then.
    """
    fresh = weight_files(new)
    standing = weight_files(submission) if holds_something(submission) else []
    for path in new.iterdir():
        target = submission / path.name
        if path.name in (*fresh, INDEX) or target.is_file() and target.read_bytes() == path.read_bytes():
            continue
        write_atomically(target, path.read_bytes())
    names = {file: _other_name(file) if file in standing and file != SINGLE else file for file in fresh}
    for file, name in names.items():
        temporary = submission / f".{name}.tmp"
        shutil.copyfile(new / file, temporary)
        fsync(temporary)
        os.replace(temporary, submission / name)
    fsync(submission)
    if SINGLE not in fresh:
        index = (new / INDEX).read_bytes()
        if any(file != name for file, name in names.items()):
            content = json.loads(index)
            content["weight_map"] = {key: names[file] for key, file in content["weight_map"].items()}
            index = json.dumps(content, indent=2).encode()
        write_atomically(submission / INDEX, index)
    # Where a single file stood, it was read rather than the index until now, when it goes.
    kept = {path.name for path in new.iterdir()} - set(fresh) | set(names.values())
    for entry in submission.iterdir():
        if entry.is_file() and entry.name not in kept and not _is_left_alone(entry.name):
            entry.unlink()
    fsync(submission)


def _other_name(shard: str) -> str:
    return shard.replace(".safetensors", ".b.safetensors")


def _extras(submission: Path, new: Path) -> set[str]:
    """What stands beside our model and is not of it: somebody's notes."""
    known = {INDEX, *weight_files(submission)}
    known |= {name for path in new.iterdir() for name in (path.name, _other_name(path.name))}
    return {entry.name for entry in submission.iterdir()} - known


def _free_name(submission: Path) -> Path:
    names = (submission.with_name(f"{submission.name}.previous{n or ''}") for n in range(1000))
    return next(path for path in names if not path.exists())


def _write_record(submission: Path, record: dict) -> None:
    content = record | {"weights": _fingerprint(submission)}
    write_atomically(record_path(submission), json.dumps(content, indent=2).encode())


def _fingerprint(folder: Path) -> dict[str, list[int]]:
    """Size and time of each weight file: a record written for others is told by them."""
    stats = {file: (folder / file).stat() for file in weight_files(folder)}
    return {file: [stat.st_size, stat.st_mtime_ns] for file, stat in stats.items()}
