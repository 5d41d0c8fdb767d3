"""Faults at a process's own changes of files: a kill -9, or a full disk, at any one of them.

A child is forked from the warm test process; in it every call that changes files is counted, and at a given
one the fault happens. What a child writes natively (torch.save, safetensors) counts as one write each.
"""

import builtins
import errno
import io
import json
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
import transformers.modeling_utils

from open_r1 import install

CHANGES = ("rename", "replace", "unlink", "remove", "rmdir", "link", "symlink")  # of names: need no room
NEEDS_ROOM = ("mkdir", "fsync", "truncate", "ftruncate")


def operations(action: Callable[[], None], scratch: Path) -> list[str]:
    """The calls that change files in a run of `action`, in order; it is run in a child."""

    def dry() -> None:
        calls = []
        undo = _watch(lambda name, half: calls.append(name))
        action()
        undo()
        scratch.write_text(json.dumps(calls))

    assert status_of(dry) == 0
    return json.loads(scratch.read_text())


def kill_points(calls: list[str]) -> list[tuple[int, bool]]:
    """(number, in the middle): before every call, and in the middle of every write. After a call is before
    the next; after the last is the end."""
    points = []
    for number, name in enumerate(calls):
        points.append((number, False))
        if name in ("write", "sendfile", "save"):
            points.append((number, True))
    return points


def killed_at(action: Callable[[], None], number: int, middle: bool) -> None:
    """Run `action` in a child that is killed at its call `number`."""

    def die(name: str, half: Callable) -> None:
        if middle:
            half()
        os.kill(os.getpid(), signal.SIGKILL)

    assert status_of(lambda: (_watch(_at(number, die)), action())) == signal.SIGKILL


def full_disk_from(number: int) -> Callable[[], None]:
    """In this process every call from `number` on that needs room fails; returns what ends it."""

    def refuse(name: str, half: Callable) -> None:
        if name in CHANGES or name == "exchange":
            return
        half()
        if name == "save":  # as torch puts it
            raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return _watch(_at(number, refuse, and_after=True))


def status_of(action: Callable) -> int:
    """Run `action` in a forked child and wait for it: 0, or what waitpid says."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        torch.set_num_threads(1)  # the pool of threads is not forked along
        action()
        os._exit(0)
    except BaseException:
        with os.fdopen(os.dup(2), "w") as shown:
            traceback.print_exc(file=shown)
        os._exit(1)


def _at(number: int, fault: Callable, and_after: bool = False) -> Callable:
    count = -1

    def seen(name: str, half: Callable) -> None:
        nonlocal count
        count += 1
        if count == number or and_after and count > number:
            fault(name, half)

    return seen


def _watch(seen: Callable[[str, Callable], None]) -> Callable[[], None]:
    """Call seen(name, half) before each change of a file; `half` does half of a write. Returns the undo."""
    undo = []

    def patch(owner, name: str, function) -> None:
        undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, function)

    def watched(name: str, original: Callable) -> Callable:
        def call(*args, **kwargs):
            seen(name, lambda: None)
            return original(*args, **kwargs)

        return call

    truncate, save_file = os.truncate, safetensors.torch.save_file
    for name in (*CHANGES, *NEEDS_ROOM):
        patch(os, name, watched(name, getattr(os, name)))
    patch(install, "exchange", watched("exchange", install.exchange))

    sendfile, write = os.sendfile, os.write

    def watched_sendfile(out, source, offset, count):
        left = os.fstat(source).st_size - offset
        if left > 0:
            seen("sendfile", lambda: sendfile(out, source, offset, left // 2))
        return sendfile(out, source, offset, count)

    def watched_write(handle, data):
        seen("write", lambda: write(handle, data[: len(data) // 2]))
        return write(handle, data)

    patch(os, "sendfile", watched_sendfile)
    patch(os, "write", watched_write)

    original_open = io.open

    def watched_open(file, mode="r", *args, **kwargs):
        if not set(mode) & set("wax+"):
            return original_open(file, mode, *args, **kwargs)
        seen("open", lambda: None)
        return _WatchedFile(original_open(file, mode, *args, **kwargs), seen)

    patch(io, "open", watched_open)
    patch(builtins, "open", watched_open)

    def watched_save(original: Callable) -> Callable:
        def save(content, path, *args, **kwargs):
            def half() -> None:
                original(content, path, *args, **kwargs)
                truncate(path, os.path.getsize(path) // 2)

            if isinstance(path, str | os.PathLike):
                seen("save", half)
            return original(content, path, *args, **kwargs)

        return save

    patch(torch, "save", watched_save(torch.save))
    patch(safetensors.torch, "save_file", watched_save(save_file))
    patch(transformers.modeling_utils, "safe_save_file", watched_save(save_file))

    def restore() -> None:
        for owner, name, original in reversed(undo):
            setattr(owner, name, original)

    return restore


class _WatchedFile:
    def __init__(self, file, seen: Callable):
        self._file, self._seen = file, seen

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self._file.close()

    def __iter__(self):
        return iter(self._file)

    def write(self, data):
        self._seen("write", lambda: (self._file.write(data[: len(data) // 2]), self._file.flush()))
        return self._file.write(data)

    def writelines(self, lines):
        for line in lines:
            self.write(line)

    def truncate(self, size=None):
        self._seen("truncate", lambda: None)
        return self._file.truncate(size)
