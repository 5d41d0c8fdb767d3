"""One process at a time: a lock on a file, which the system frees when its process ends, killed or not."""

import fcntl
import os
from pathlib import Path

_held: dict[Path, int] = {}  # open for as long as the process lives: closing a file would free its lock


def lock(path: Path, refusal: str) -> None:
    """ValueError with `refusal` while another process holds the lock on `path`, which is made."""
    path = path.resolve()
    if path not in _held:
        _held[path] = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(_held[path], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:  # POSIX allows either
        raise ValueError(refusal) from error
    except OSError:  # a file system without locks
        return


def lock_out(out: Path) -> None:
    """Makes a run's folder this process's."""
    lock(out / ".lock", f"another process is training in {out}: wait for it, or set another OUT")


def lock_submission(submission: Path) -> None:
    """Two writers would take the model that one of them is writing for theirs."""
    submission = submission.resolve()
    submission.parent.mkdir(parents=True, exist_ok=True)
    refusal = f"another process trains into {submission}: wait for it, or set another SUBMISSION"
    lock(submission.with_name(f".{submission.name}.lock"), refusal)
