"""A new model takes a folder's place in one step; after a kill at any moment a whole one stands there.

Beside `<submission>` are its record, `<submission>.record.json`, written just before the step, which keeps
that of the model it replaces (whichever stands there after a kill has its record); `.<submission>.new`, a
model being written, deleted by the next run; and `.<submission>.swap`, somebody's model on its way to
`<submission>.previous`, or a new one that never came in. A folder that cannot be exchanged holds OLD, NEW and
STANDING while the model in it is switched, and links.
"""

import ctypes
import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .checkpoint import INDEX, fsync, fsync_tree, temporary, weight_files, write_atomically

OLD, NEW = ".submission-old", ".submission-new"  # the two models, while one takes the other's place inside
STANDING = ".submission-standing"  # a link to one of them
PART = ".submission-part"  # a link that is being made
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
    temporary(record_path(submission)).unlink(missing_ok=True)
    swap = _swap(submission)
    if swap.exists():
        if _is_recorded(swap, submission):  # the new model, which never came in
            shutil.rmtree(swap)
        else:
            swap.rename(_free_name(submission))
    if submission.is_dir():
        _settle(submission)


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
            _switch_inside(new, submission, record)
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
            _switch_inside(new, submission, record)
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
    shutil.copytree(submission, part, ignore=shutil.ignore_patterns("lost+found"))
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


def refuse_without_links(submission: Path) -> None:
    """Raise ValueError on a file system where a model inside a folder could not be switched in one step."""
    place = submission if submission.is_dir() else submission.parent
    try:
        _lead(place / STANDING, OLD)
        (place / STANDING).unlink()
    except OSError as error:
        raise ValueError(
            f"SUBMISSION {submission} lies on a file system without symbolic links ({error.strerror}), where "
            "a kill could leave half a model; set it to a folder on another disk."
        ) from error


def _switch_inside(new: Path, submission: Path, record: dict) -> None:
    """Switch the model inside a folder, with all files beside it, by a change of one name: STANDING's.

    One after another the names in the folder become links to STANDING/name, which leads to the very same file
    in OLD; a link that leads nowhere counts as no file. Then STANDING leads to NEW, and the links become its
    files. Whatever is not of the new model is gone then.
    """
    try:
        copied = shutil.copytree(new, submission / NEW)
        fsync_tree(copied)
        fresh = {path.name for path in copied.iterdir()}
        names = {path.name for path in submission.iterdir() if path.is_file()}
        standing = {name for name in names if name in fresh or not _is_left_alone(name)}
        (submission / OLD).mkdir()
        for name in standing:
            _same_file(submission / name, submission / OLD / name)
        fsync_tree(submission / OLD)
        _lead(submission / STANDING, OLD)
        for name in sorted(fresh | standing):
            _lead(submission / name, f"{STANDING}/{name}")
        write_record(submission, record, fingerprint(copied))
        fsync(submission)
        _lead(submission / STANDING, NEW)
        fsync(submission)
    finally:
        _settle(submission)


def _same_file(path: Path, other: Path) -> None:
    """Let `other` be the same file."""
    if path.is_symlink():
        other.symlink_to(path.resolve())
        return
    try:
        os.link(path, other)
    except OSError:  # somebody else's file, or a file system without such links
        shutil.copy2(path, other)


def _lead(link: Path, target: str) -> None:
    """Let `link` lead to `target`, whatever stood there."""
    part = link.with_name(PART)
    part.unlink(missing_ok=True)
    part.symlink_to(target)
    os.replace(part, link)


def _settle(submission: Path) -> None:
    """Plain files again, of the model that STANDING leads to, in a folder where a switch was begun."""
    standing = submission / STANDING
    if standing.is_symlink():
        model = submission / os.readlink(standing)
        for path in model.iterdir():
            os.replace(path, submission / path.name)
        for path in submission.iterdir():
            if path.is_symlink() and os.readlink(path).startswith(f"{STANDING}/"):
                path.unlink()
        fsync(submission)
        standing.unlink()
    (submission / PART).unlink(missing_ok=True)
    for name in (OLD, NEW):
        shutil.rmtree(submission / name, ignore_errors=True)


def _extras(submission: Path, new: Path) -> set[str]:
    """What stands beside our model and is not of it: somebody's notes."""
    known = {INDEX, *weight_files(submission)}
    known |= {path.name for path in new.iterdir()}
    return {entry.name for entry in submission.iterdir()} - known


def _previous(submission: Path) -> Iterator[Path]:
    return (submission.with_name(f"{submission.name}.previous{n or ''}") for n in range(1000))


def _free_name(submission: Path) -> Path:
    return next(path for path in _previous(submission) if not path.exists())


def holds_something(submission: Path) -> bool:
    """False for a folder that is missing, or empty but for hidden files, lost+found and links to nowhere."""
    if not os.path.isdir(submission):
        return False
    return any(entry.exists() and not _is_left_alone(entry.name) for entry in submission.iterdir())


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
