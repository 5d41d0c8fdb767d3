"""A new model takes a folder's place in one step; after a kill at any moment a whole one stands there.

Beside `<submission>` are its record, `<submission>.record.json`, written just before the step, which keeps
that of the model it replaces (whichever stands there after a kill has its record); `.<submission>.new`, a
model being written, deleted by the next run; and `.<submission>.swap`, somebody's model on its way to
`<submission>.previous`, or a new one that never came in. In a folder that cannot be exchanged, UNFILLED and
REPLACING say what is ours.
"""

import ctypes
import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .checkpoint import INDEX, SINGLE, fsync, fsync_tree, temporary, weight_files, write_atomically

UNFILLED = ".unfilled"  # in a folder that held nothing, while the base is copied into it
REPLACING = ".replacing"  # in a folder whose model is replaced in place: the names that go
FOUND = "found there"  # the recipe of a model that was not written here


@contextmanager
def staging_folder(submission: Path) -> Iterator[Path]:
    """A folder of ours beside the submission, for a new model, and after the exchange for the old one."""
    staging = submission.with_name(f".{submission.name}.new")
    staging.mkdir(parents=True)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def tidy(submission: Path) -> None:
    """Put right what a killed run left, beside the submission and in it."""
    for name in ("new", "previous.part"):
        shutil.rmtree(submission.with_name(f".{submission.name}.{name}"), ignore_errors=True)
    for path in (record_path(submission), submission / REPLACING):
        temporary(path).unlink(missing_ok=True)
    swap = _swap(submission)
    if swap.exists():
        if _is_recorded(swap, submission):  # the new model, which never came in
            shutil.rmtree(swap)
        else:
            swap.rename(_free_name(submission))
    if (submission / REPLACING).exists():
        old, new = json.loads((submission / REPLACING).read_bytes())
        standing = weight_files(submission) if holds_something(submission) else []
        standing += [INDEX] if SINGLE not in standing else []
        for name in old if _is_recorded(submission, submission) else new:
            if name not in standing:
                (submission / name).unlink(missing_ok=True)
        (submission / REPLACING).unlink()


def _swap(submission: Path) -> Path:
    return submission.with_name(f".{submission.name}.swap")


def install(new: Path, submission: Path, record: dict) -> None:
    """Put the model `new` in the submission's place, in one step.

    A model that stood there and was not written here, or has notes in it, is kept as `<submission>.previous`.
    """
    fsync_tree(new)
    if not holds_something(submission):
        write_record(submission, record, fingerprint(new))
        try:
            os.rename(new, submission)  # an empty folder is replaced as well
        except OSError:  # a mount point, or hidden files in it
            (submission / UNFILLED).touch()
            fsync(submission)
            _replace_in_place(new, submission, record)
            (submission / UNFILLED).unlink()
    else:
        standing = read_record(submission)
        ours = standing is not None and standing.get("recipe") != FOUND
        extras = _extras(submission, new) if ours else set()
        write_record(submission, record, fingerprint(new))
        beside = new if ours and not extras else new.rename(_swap(submission))
        try:
            exchange(beside, submission)
        except OSError:  # a mount point, or a file system without the call
            beside.rename(new)
            if not ours or not all(map(_is_left_alone, extras)):
                _keep_copy(submission)
            _replace_in_place(new, submission, record)
        else:
            if beside != new:
                beside.rename(_free_name(submission))
    fsync(submission.parent)


def _keep_copy(submission: Path) -> None:
    """A copy as `<submission>.previous`, unless a run that was killed has made it already."""
    part = submission.with_name(f".{submission.name}.previous.part")
    standing = _listing(submission)
    if any(path.exists() and _listing(path) == standing for path in _previous(submission)):
        return
    shutil.copytree(submission, part, ignore=shutil.ignore_patterns("lost+found", REPLACING))
    fsync_tree(part)
    part.rename(_free_name(submission))


def _listing(folder: Path) -> dict[Path, list[int]]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {path.relative_to(folder): _size_and_time(path) for path in files}


def exchange(one: Path, other: Path) -> None:
    """Let two paths change places in one step. OSError where the system cannot do it."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.ENOSYS, "renameat2 is missing")
    at_cwd, rename_exchange = -100, 2
    if renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), rename_exchange) != 0:
        raise OSError(ctypes.get_errno(), "renameat2 refused", str(other))


def _replace_in_place(new: Path, submission: Path, record: dict) -> None:
    """Switch the model inside a folder, by a change of one name: the index's, or the single weight file's.

    Shards come under names that the standing index does not use, so that they are nobody's until the switch.
    Companions that differ (only somebody else's can) are renamed one by one just before it. Whatever is not
    of the new model is deleted then. After a kill, tidy does that, or deletes what has not come to stand.
    """
    fresh = weight_files(new)
    standing = weight_files(submission) if holds_something(submission) else []
    names = {file: _other_name(file) if file in standing and file != SINGLE else file for file in fresh}
    changed = [path.name for path in new.iterdir() if path.name not in fresh and path.name != INDEX]
    changed = [name for name in changed if not _same(new / name, submission / name)]
    switch = SINGLE if SINGLE in fresh else INDEX
    part = {name: submission / f".{name}.part" for name in {*names.values(), *changed, switch}}
    kept = {path.name for path in new.iterdir()} - set(fresh) | set(names.values())
    files = [path.name for path in submission.iterdir() if path.is_file() and not _is_left_alone(path.name)]
    parts = [path.name for path in part.values()]
    old = [name for name in files if name not in kept] + parts
    write_atomically(submission / REPLACING, json.dumps([old, [*parts, *names.values(), INDEX]]).encode())
    for file, name in (*names.items(), *zip(changed, changed, strict=True)):
        shutil.copyfile(new / file, part[name])
    if SINGLE not in fresh:
        part[INDEX].write_bytes(_index(new, names))
    for path in part.values():
        fsync(path)
    write_record(submission, record, {name: _size_and_time(part[name]) for name in names.values()})
    for name in sorted(names.values()):
        if name != SINGLE:
            os.replace(part[name], submission / name)
    fsync(submission)
    for name in changed:
        os.replace(part[name], submission / name)
    os.replace(part[switch], submission / switch)
    fsync(submission)
    # Where a single file stood, it was read rather than the index until now, when it goes.
    for name in sorted(old, key=lambda name: name != SINGLE):
        (submission / name).unlink(missing_ok=True)
    (submission / REPLACING).unlink()
    fsync(submission)


def _index(new: Path, names: dict[str, str]) -> bytes:
    """The index with other names of the shards; byte for byte the base's, where they are its own."""
    index = (new / INDEX).read_bytes()
    if all(file == name for file, name in names.items()):
        return index
    content = json.loads(index)
    content["weight_map"] = {key: names[file] for key, file in content["weight_map"].items()}
    return json.dumps(content, indent=2).encode()


def _same(one: Path, other: Path) -> bool:
    return other.is_file() and one.read_bytes() == other.read_bytes()


def _other_name(shard: str) -> str:
    return shard.replace(".safetensors", ".b.safetensors")


def _extras(submission: Path, new: Path) -> set[str]:
    """What stands beside our model and is not of it: somebody's notes."""
    known = {INDEX, *weight_files(submission)}
    known |= {name for path in new.iterdir() for name in (path.name, _other_name(path.name))}
    return {entry.name for entry in submission.iterdir()} - known


def _previous(submission: Path) -> Iterator[Path]:
    return (submission.with_name(f"{submission.name}.previous{n or ''}") for n in range(1000))


def _free_name(submission: Path) -> Path:
    return next(path for path in _previous(submission) if not path.exists())


def holds_something(submission: Path) -> bool:
    """False for a folder that is missing, empty but for hidden files and lost+found, or was never filled."""
    if not submission.is_dir() or (submission / UNFILLED).exists():
        return False
    return any(not _is_left_alone(entry.name) for entry in submission.iterdir())


def _is_left_alone(name: str) -> bool:
    return name.startswith(".") or name == "lost+found"


# The record


def record_path(submission: str | Path) -> Path:
    submission = Path(submission).resolve()
    return submission.with_name(f"{submission.name}.record.json")


def read_record(submission: str | Path) -> dict | None:
    """The record of the model that stands there; None without one, or when it is about other weights."""
    weights = fingerprint(Path(submission))
    try:
        written = json.loads(record_path(submission).read_bytes())
        for record in (written, written.pop("before", None)):
            if weights and record and record.pop("weights") == weights:
                return record
    except (OSError, ValueError, KeyError, AttributeError):
        pass
    return None


def write_record(submission: Path, record: dict, weights: dict[str, list[int]]) -> None:
    """The record of the model of these weight files; the one of what stands there is kept beside it."""
    before = read_record(submission)
    before = before and before | {"weights": fingerprint(submission)}
    content = record | {"weights": weights, "before": before}
    write_atomically(record_path(submission), json.dumps(content, indent=2).encode())


def _is_recorded(folder: Path, submission: Path) -> bool:
    """Whether the newest record is about the weights in `folder`."""
    try:
        return json.loads(record_path(submission).read_bytes())["weights"] == fingerprint(folder)
    except (OSError, ValueError, KeyError):
        return False


def fingerprint(folder: Path) -> dict[str, list[int]] | None:
    """Size and time of each weight file: a record of others is told by them. None: no whole model."""
    try:
        return {file: _size_and_time(folder / file) for file in weight_files(folder)}
    except (OSError, ValueError):
        return None


def _size_and_time(file: Path) -> list[int]:
    return [file.stat().st_size, file.stat().st_mtime_ns]
