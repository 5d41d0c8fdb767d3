"""A run that is killed with kill -9 and started again by the same command ends as if nothing had happened."""

import json
import os
import shutil
import signal
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from open_r1 import complete, grpo, keep_best, saving, validation
from open_r1.callbacks import keep_until
from open_r1.install import read_record
from open_r1.sampling import Sampling
from tests.faults import status_of
from tests.test_grpo import folder, lines, run, without_times  # noqa: F401 (folder is a fixture)

MORE = (
    "--eval_strategy", "steps", "--eval_steps", 1, "--optim", "adamw_torch", "--max_grad_norm", 0.5,
    "--lr_scheduler_type", "cosine", "--warmup_steps", 1, "--keep_top", 2,
)  # fmt: skip
SHAPES = {
    "an update a rollout": ("--max_steps", 5, "--save_steps", 2, "--logging_steps", 3),
    "four updates a rollout": (
        "--max_steps", 8, "--save_steps", 4, "--steps_per_generation", 4, "--num_iterations", 2,
    ),
}  # fmt: skip


def by_text(examples: list) -> dict:
    """A summary whose score follows from what the model says, so that it moves with the weights."""
    text = "".join(example.text for example in examples).encode()
    return {"accuracy_pct": zlib.crc32(text) % 1000 / 10}


def quick_validations(patch: pytest.MonkeyPatch) -> None:
    original = validation.summarize
    patch.setattr(validation, "summarize", lambda examples: original(examples) | by_text(examples))
    patch.setattr(keep_best, "score", lambda summaries: 0.0)  # the base's: every run finds better ones
    patch.setattr(validation, "GREEDY", Sampling(greedy=True, max_new_tokens=12))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    quick_validations(monkeypatch)


def start(folder: Path, root: Path, shape: str, *more):  # noqa: F811
    flags = ("--val_dataset", folder / "val", "--submission_dir", root / "submission", *MORE, *SHAPES[shape])
    return run(folder, root / "out", *flags, *more)


@pytest.fixture(scope="module")
def uninterrupted(folder, tmp_path_factory):  # noqa: F811
    roots = {}
    with pytest.MonkeyPatch.context() as patch:
        quick_validations(patch)
        for shape in SHAPES:
            roots[shape] = tmp_path_factory.mktemp("whole")
            start(folder, roots[shape], shape)
    return roots


def die(*_, **__) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(owner: object, name: str, number: int, then: Callable) -> None:
    """In a child: at its call `number` of this method, `then` happens instead."""
    original, count = getattr(owner, name), 0

    def counted(*args, **kwargs):
        nonlocal count
        count += 1
        return (then if count == number else original)(*args, **kwargs)

    setattr(owner, name, counted)


def cut_short(content, path, *_, **__) -> None:
    """A file that is being written when the kill comes."""
    Path(path).write_bytes(b"x" * 1000)
    die()


def submission_without_checkpoint(number: int) -> None:
    """A better model stands there, and the checkpoint of its update is never written."""
    write = keep_best.write_submission
    at_call(keep_best, "write_submission", number, lambda *a: (write(*a), die()))


TRAINER = grpo.Qwen2VLGRPOTrainer
KILLS = {
    # In the first update, before any checkpoint.
    "in the first row": lambda: at_call(TRAINER, "compute_loss", 1, die),
    # Rows are two an update: in the fourth update the first one is learned, the second is not.
    "within an update": lambda: at_call(TRAINER, "compute_loss", 8, die),
    "in a rollout": lambda: at_call(TRAINER, "roll_out", 2, die),
    "in a validation": lambda: at_call(validation, "gather_examples", 4, die),
    "after the first better submission": lambda: submission_without_checkpoint(1),
    "in a save": lambda: at_call(torch, "save", 2, cut_short),
    "before the marker": lambda: at_call(complete, "mark_complete", 1, die),
    "before the old checkpoint goes": lambda: at_call(saving, "prune", 1, die),
}


ONCE = ("in the first row", "in a validation", "before the marker", "before the old checkpoint goes")
PAIRS = [(kill, shape) for kill in KILLS for shape in list(SHAPES)[: 1 if kill in ONCE else 2]]


@pytest.mark.parametrize("kill, shape", PAIRS)
def test_killed_and_started_again_equals_uninterrupted(
    folder,  # noqa: F811
    uninterrupted,
    tmp_path,
    kill,
    shape,
    capsys,
):
    assert status_of(lambda: (KILLS[kill](), start(folder, tmp_path, shape))) == signal.SIGKILL
    begun = (tmp_path / "out/run.json").read_text()
    capsys.readouterr()
    trainer = start(folder, tmp_path, shape)
    assert json.loads(begun)["run"] == trainer.run
    shown = capsys.readouterr().out
    if (tmp_path / "out/logs.jsonl").exists() and "in the first row" not in kill:
        assert "base:\n" not in shown  # measured once
    assert_same_run(tmp_path, uninterrupted[shape])


def assert_same_run(got: Path, expected: Path) -> None:
    for name in ("logs.jsonl", "rollouts.jsonl"):
        a, b = lines(got / "out" / name), lines(expected / "out" / name)
        if name == "logs.jsonl":
            assert [line["step"] for line in a] == [line["step"] for line in b]
            evals = [[line for line in log if "eval_score" in line] for log in (a, b)]
            assert evals[0] == evals[1]
            a, b = without_times(a), without_times(b)
        assert a == b, name
    files = [sorted(path.name for path in root.glob("out/checkpoint-*")) for root in (got, expected)]
    assert files[0] == files[1]
    last = max(files[0], key=lambda name: int(name.partition("-")[2]))
    a, b = got / "out" / last, expected / "out" / last
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        assert same(*(torch.load(root / name, weights_only=False) for root in (a, b))), name
    markers = [complete.complete_marker(root) for root in (a, b)]
    for name in ("validated_at", "best_score", "stale_validations"):
        assert markers[0][name] == markers[1][name], name
    records = [read_record(root / "submission") for root in (got, expected)]
    assert all(record.pop("measured_in") for record in records) and records[0] == records[1]
    masters = [{p.name: load_file(p) for p in root.glob("out/masters/*")} for root in (got, expected)]
    assert len(masters[0]) == 2 and same(*masters)
    curves = [lines(root / "out/validation.jsonl") for root in (got, expected)]
    assert all(line.pop("measured_in") for curve in curves for line in curve) and curves[0] == curves[1]
    for path in (expected / "submission").iterdir():
        assert (got / "submission" / path.name).read_bytes() == path.read_bytes(), path.name


def same(a, b) -> bool:
    """Equal to the bit, all the way down."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(torch.equal(torch.as_tensor(a), torch.as_tensor(b))) if hasattr(a, "shape") else a == b


def test_an_older_checkpoint_is_gone_on_from(folder, uninterrupted, tmp_path, capsys):  # noqa: F811
    """Those behind it are renamed, not deleted, and do not stand in the way of the new ones."""
    shape = "an update a rollout"
    out = shutil.copytree(uninterrupted[shape] / "out", tmp_path / "out")
    shutil.copytree(uninterrupted[shape] / "submission", tmp_path / "submission")
    older = min(out.glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    capsys.readouterr()
    start(folder, tmp_path, shape, "--resume_from_checkpoint", older)
    shown = capsys.readouterr().out
    assert f"is behind {older.name}, which was asked for: renamed to checkpoint-5.aside" in shown
    names = {path.name for path in out.glob("checkpoint-*")}
    assert names == {older.name, "checkpoint-5", "checkpoint-5.aside"}
    new, old = (out / name / "model.safetensors" for name in ("checkpoint-5", "checkpoint-5.aside"))
    assert new.read_bytes() == old.read_bytes()


def test_a_resumed_run_saves_and_logs_as_its_own_flags_say(folder, tmp_path):  # noqa: F811
    """A checkpoint brings the steps between two saves along, those of the run that wrote it."""
    run(folder, tmp_path, "--max_steps", 1, "--save_steps", 5, "--logging_steps", 5)
    run(folder, tmp_path, "--max_steps", 4, "--save_steps", 3, "--logging_steps", 2)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]
    logged = [line["step"] for line in lines(tmp_path / "logs.jsonl") if "loss" in line]
    assert logged == [1, 2, 3, 4]  # each checkpoint follows a line


def test_a_log_is_cut_between_its_lines_and_nowhere_else(tmp_path):
    """A model may say what Python takes for the end of a line, and a kill leaves half a character."""
    log, rows = tmp_path / "rollouts.jsonl", [{"step": n, "text": f"{n} \u2028 \x85 é"} for n in (1, 2, 3, 4)]
    written = [json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows]
    log.write_bytes(b"".join(written)[:-4])  # within the last letter
    keep_until(log, 2)
    assert log.read_bytes() == b"".join(written[:2])
