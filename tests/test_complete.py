"""A trainer's checkpoints: found when whole, published in one step, pruned when ours."""

import os
import shutil
from pathlib import Path

import pytest

from open_r1.complete import (
    COMPLETE,
    SAVING,
    checkpoint_fault,
    clear_saving,
    mark_complete,
    newest_complete,
    own_checkpoints,
    prune,
    publish,
)
from open_r1.saving import SavesCheckpoints
from tests.faults import full_disk_from, kill_points, killed_at, operations
from tests.test_checkpoint import record_fsync


def make_checkpoint(out: Path, step: int, complete: bool = True, run: str = "ours") -> Path:
    folder = out / f"checkpoint-{step}"
    (folder / "global_step").mkdir(parents=True)
    (folder / "trainer_state.json").write_text("{}")
    (folder / "global_step" / "rank0.pt").write_bytes(b"x" * 100)
    if complete:
        mark_complete(folder, {"step": step, "world_size": 2, "run": run})
    return folder


def test_the_newest_whole_checkpoint_is_found_and_the_others_are_named(tmp_path, capsys):
    assert newest_complete(tmp_path) is None
    make_checkpoint(tmp_path, 5)
    expected = make_checkpoint(tmp_path, 20)
    os.truncate(make_checkpoint(tmp_path, 100) / "global_step" / "rank0.pt", 50)
    make_checkpoint(tmp_path, 120, complete=False)
    (make_checkpoint(tmp_path, 140) / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-best").mkdir()
    assert newest_complete(tmp_path) == (expected, {"step": 20, "world_size": 2, "run": "ours"})
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0].rpartition("-")[2] for line in shown] == ["140", "120", "100"]
    assert shown[0].endswith("is skipped: trainer_state.json is missing.")
    assert "COMPLETE, written last, is missing" in shown[1]
    assert shown[2].endswith("is skipped: global_step/rank0.pt has 50 of 100 bytes.")


@pytest.mark.parametrize("content", ["[]", "null", '{"step": 5}', '{"step": 5, "files": {}}', "done"])
def test_a_file_of_that_name_which_somebody_else_wrote_is_no_marker(tmp_path, content, capsys):
    (make_checkpoint(tmp_path, 5, complete=False) / "COMPLETE").write_text(content)
    assert newest_complete(tmp_path) is None and "is skipped" in capsys.readouterr().out
    assert own_checkpoints(tmp_path, None) == []


def test_a_note_put_into_a_checkpoint_does_not_spoil_it(tmp_path):
    folder = make_checkpoint(tmp_path, 20)
    (folder / "notes.txt").write_text("good one")
    assert newest_complete(tmp_path)[0] == folder


def test_the_marker_comes_last_and_after_all_files_are_on_disk(tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path, 20, complete=False)
    synced = record_fsync(monkeypatch)
    replace = os.replace

    def checked(source, target):
        files = {"trainer_state.json", "rank0.pt", ".COMPLETE.tmp"}
        assert files | {"global_step", "checkpoint-20"} <= set(synced)
        replace(source, target)

    monkeypatch.setattr(os, "replace", checked)
    mark_complete(folder, {"step": 20, "world_size": 1})
    assert synced[-1] == "checkpoint-20" and (folder / COMPLETE).is_file()


def test_a_kill_between_the_markers_two_steps_leaves_no_trace(tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path, 20, complete=False)
    (folder / ".COMPLETE.tmp").write_text("{")  # as a kill leaves it
    mark_complete(folder, {"step": 20, "world_size": 1})
    assert newest_complete(tmp_path)[0] == folder


# Publishing and pruning


def write_parts(out: Path, step: int) -> Path:
    """As all ranks leave it in OUT/.saving."""
    return make_checkpoint(out / SAVING, step, complete=False)


INFO = {"world_size": 2, "run": "ours"}


def test_prune_keeps_the_newest_whole_ones_and_what_is_not_ours(tmp_path):
    for step in (10, 20, 30, 40):
        make_checkpoint(tmp_path, step)
    make_checkpoint(tmp_path, 5, complete=False)
    make_checkpoint(tmp_path, 7, run="another")
    shutil.copytree(tmp_path / "checkpoint-10", tmp_path / "checkpoint-best")
    shutil.copytree(tmp_path / "checkpoint-10", tmp_path / "checkpoint-15")  # somebody's copy, by its marker
    os.truncate(tmp_path / "checkpoint-40" / "trainer_state.json", 1)
    prune(tmp_path, "ours", keep=2)
    left = {folder.name.removeprefix("checkpoint-") for folder in tmp_path.iterdir()}
    assert left == {"5", "7", "15", "20", "30", "40", "best"}
    prune(tmp_path, "ours", keep=3)
    assert (tmp_path / "checkpoint-20").is_dir()


def test_publishing_over_an_older_one_replaces_ours_and_moves_the_others(tmp_path):
    for run, left in (("ours", set()), ("another", {"checkpoint-20.aside"})):
        out = tmp_path / run
        make_checkpoint(out, 20, run=run)
        (out / "checkpoint-20/notes.txt").write_text("old")
        publish(write_parts(out, 20), out, INFO | {"step": 20})
        clear_saving(out)
        assert checkpoint_fault(out / "checkpoint-20") is None
        assert {path.name for path in out.iterdir()} == {"checkpoint-20"} | left
        assert not (out / "checkpoint-20/notes.txt").exists()
    assert (tmp_path / "another/checkpoint-20.aside/notes.txt").read_text() == "old"


def test_a_kill_at_any_change_leaves_the_checkpoint_before_or_the_new_one(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # a kill loses nothing that was written
    out = tmp_path / "out"

    def prepare():
        shutil.rmtree(out, ignore_errors=True)
        for step in (10, 20):
            make_checkpoint(out, step)
        (out / "checkpoint-30").mkdir()  # somebody's
        (out / "checkpoint-30/notes.txt").write_text("mine")

    def save():
        clear_saving(out)
        publish(write_parts(out, 30), out, INFO | {"step": 30})
        prune(out, "ours")
        clear_saving(out)

    prepare()
    calls = operations(save, tmp_path / "calls.json")
    seen = []
    for number, middle in kill_points(calls):
        prepare()
        killed_at(save, number, middle)
        seen.append(newest_complete(out)[1]["step"])
        whole = [int(path.name.removeprefix("checkpoint-")) for path in own_checkpoints(out, "ours")]
        assert whole in ([10, 20], [10, 20, 30], [20, 30]), (calls[number], middle)
        save()
        assert newest_complete(out)[1]["step"] == 30
        found = [path for path in out.iterdir() if ".aside" in path.name]
        assert [(path / "notes.txt").read_text() for path in found] == ["mine"]
        names = {path.name for path in out.iterdir()} - {path.name for path in found}
        assert names == {"checkpoint-20", "checkpoint-30"}
    assert len(seen) > 30 and seen == sorted(seen) and set(seen) == {20, 30}
    for number in range(len(calls)):
        prepare()
        undo = full_disk_from(number)
        try:
            save()
        except OSError:
            pass
        finally:
            undo()
        assert newest_complete(out)[1]["step"] in (20, 30)
        assert own_checkpoints(out, "ours")[-1].name in ("checkpoint-20", "checkpoint-30")


def test_one_checkpoint_stays_where_the_disk_has_no_room_for_two(tmp_path, monkeypatch):
    """The oldest goes before a save only if that makes room for it."""
    saver, usage = SavesCheckpoints(), type(shutil.disk_usage("/"))
    saver.run = "ours"
    for free, left in ((10**9, {10, 20}), (30, {20}), (0, {10, 20})):
        shutil.rmtree(tmp_path)
        for step in (10, 20):
            make_checkpoint(tmp_path, step)
        (tmp_path / "checkpoint-20/trainer_state.json").write_text("x" * 20)  # the newer one is larger
        mark_complete(tmp_path / "checkpoint-20", INFO | {"step": 20})
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage(10**9, 0, free))
        if free == 0:
            with pytest.raises(OSError, match="has 0.00 GB free"):
                saver._make_room(tmp_path)
        else:
            saver._make_room(tmp_path)
        assert {int(path.name[11:]) for path in tmp_path.glob("checkpoint-*")} == left
