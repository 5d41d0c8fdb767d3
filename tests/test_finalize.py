"""finalize.py: what it scores is what it writes, it stops in time, and a kill leaves the old submission."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset, Features, Image, Value

from methods.demo import draw
from open_r1 import finalize, submission
from open_r1.checkpoint import load_policy, tensor_slots
from open_r1.install import read_record
from open_r1.mixing import write_masters
from open_r1.selection import Outcome
from open_r1.submission import ensure_submission, write_submission
from tests.data_sets import table
from tests.faults import status_of
from tests.test_submission import contents, values
from tests.tiny import save_public_form

ROOT = Path(__file__).resolve().parent.parent
ROWS = 40
# The rows that a candidate gets right. LUCKY has more than BASE, but mostly others: it may be luck.
BASE, LUCKY, GOOD, BEST = set(range(20)), set(range(18, ROWS)), set(range(28)), set(range(30))


def outcome(right: set[int]) -> Outcome:
    return Outcome({"val": {row: row in right for row in range(ROWS)}})


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finalize") / "base"
    save_public_form(folder, seed=0)
    table().save_to_disk(folder.parent / "val")
    return folder


class Finished:
    """A run that has ended: its plan, and float32 weights of updates 10 (seed 1) and 20 (seed 2)."""

    def __init__(self, base: Path, folder: Path, monkeypatch):
        self.base, self.out, self.sub = base, folder / "out", folder / "submission"
        self.found: dict[str, set[int]] = {}  # by candidate
        self.held: dict[str, dict[str, torch.Tensor]] = {}
        self.out.mkdir()
        shapes = {name: places[0].shape for name, places in tensor_slots(base).items()}
        for seed, step in ((1, 10), (2, 20)):
            about = {"run": "mine", "step": str(step), "score": str(float(step))}
            path = self.out / f"masters/update-{step}.safetensors"
            write_masters(path, shapes, values(seed).items(), about)
        another = self.out / "masters/update-30.safetensors"
        write_masters(another, shapes, values(3).items(), {"run": "another"})
        plan = {
            "run": "mine", "measured_in": "mine rows", "base": str(base), "submission": str(self.sub),
            "sets": {"val": str(base.parent / "val")}, "split": ["train", None],
            "rows": {"val": [0, 1, 2, 3]}, "level": 0.9, "minutes": 15, "alphas": [0.5, 0.25],
        }  # fmt: skip
        (self.out / "selection.json").write_text(json.dumps(plan))
        ensure_submission(base, self.sub)
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(finalize, "launch", lambda args, sets, job: job(0, 1, args, sets))
        monkeypatch.setattr(finalize, "measure", self.measure)

    def measure(self, engine, encoder, loaded, rows, rank, world_size, args, name):
        assert list(loaded) == ["val"] and rows == {"val": [0, 1, 2, 3]}
        self.held[name] = {n: p.clone() for n, p in engine.model.named_parameters()}
        found = self.found.get(name, BASE)
        return None if found is None else outcome(found)

    def finalize(self, *flags) -> int:
        self.held.clear()
        self.monkeypatch.setattr(sys, "argv", ["finalize.py", str(self.out), *map(str, flags)])
        return finalize.main()

    @property
    def result(self) -> dict:
        return json.loads((self.out / "finalize.json").read_text())

    @property
    def status(self) -> dict:
        return json.loads((self.out / "finalize-status.json").read_text())


@pytest.fixture
def run(base, tmp_path, monkeypatch) -> Finished:
    return Finished(base, tmp_path, monkeypatch)


def mixture_of(base: Path, weights: dict[int, float]) -> dict[str, torch.Tensor]:
    """Seed 0 is the base, as its file has it; in float64, rounded once."""
    models = {seed: values(seed) for seed in weights}
    if 0 in models:
        models[0] = dict(load_policy(base, torch.float32).named_parameters())
    with torch.no_grad():
        return {
            name: sum(part * models[seed][name].double() for seed, part in weights.items()).bfloat16()
            for name in next(iter(models.values()))
        }


def same_weights(got: dict, expected: dict) -> bool:
    """But for a float32 sum that lies next to a tie."""
    different = sum((got[name] != expected[name]).sum() for name in expected)
    return got.keys() == expected.keys() and different <= 3


def test_what_is_scored_is_mixed_from_the_masters_and_what_wins_is_written(run, capsys):
    run.found = {"update 10": GOOD, "update 20": LUCKY, "average": GOOD, "0.5 x update 10": BEST}
    assert run.finalize() == 0
    # The base stood there, and is scored once; another run's weights are left out; ties go to the first.
    names = ["base", "update 20", "update 10", "average", "0.5 x update 10", "0.25 x update 10"]
    assert list(run.held) == names
    expected = {
        "base": {0: 1}, "update 20": {2: 1}, "average": {1: 0.5, 2: 0.5}, "0.5 x update 10": {0: 0.5, 1: 0.5},
        "0.25 x update 10": {0: 0.75, 1: 0.25},
    }  # fmt: skip
    for name, weights in expected.items():
        assert same_weights(run.held[name], mixture_of(run.base, weights)), name
    stands = dict(load_policy(run.sub, torch.bfloat16).named_parameters())
    assert all(torch.equal(stands[name], value) for name, value in run.held["0.5 x update 10"].items())
    record = read_record(run.sub)
    assert record["recipe"] == "finalize" and record["mixture"] == {"base": 0.5, "update 10": 0.5}
    assert record["score"] == 75.0 and "measured_in" not in record
    result, shown = run.result, capsys.readouterr().out
    assert result["submitted"] == "0.5 x update 10" and result["complete"]
    sure = {name: one["confidence"] for name, one in result["candidates"].items()}
    assert sure["update 20"] < 0.9 < sure["average"]
    (line,) = [line for line in (run.out / "finalize.txt").read_text().splitlines() if line.startswith("*")]
    assert "0.5 x update 10" in line and "75.00" in line and line in shown
    assert run.status["cause"] == "finished" and run.status["exit_code"] == 0

    # Again: nothing is new. With other rows there is, and what stands there is one of the candidates.
    assert run.finalize() == 0 and not run.held
    assert "nothing is new since" in capsys.readouterr().out
    before = contents(run.sub)
    run.found["submission"] = BEST
    assert run.finalize("--limit", 4) == 0 and list(run.held)[:2] == ["base", "submission"]
    assert contents(run.sub) == before and run.result["submitted"] == "submission"


def test_the_bar_nothing_that_does_not_beat_the_base_is_submitted(run):
    """A training that made it worse, and one that is better by luck."""
    before = contents(run.sub)
    run.found = {"update 10": set(range(5)), "update 20": LUCKY}
    assert run.finalize() == 0
    assert run.result["submitted"] == "base" and contents(run.sub) == before
    # What stands there, from elsewhere, scores below the base: the base takes its place.
    write_submission(run.base, run.sub, values(5).items(), {"recipe": "grpo", "step": 7})
    run.found["submission"] = set(range(19))
    assert run.finalize() == 0
    assert run.result["submitted"] == "base" and contents(run.sub) == before
    assert read_record(run.sub)["recipe"] == "base"


def test_what_a_run_submitted_is_scored_once_and_is_what_it_has_to_beat(run):
    record = {"recipe": "grpo", "step": 20, "score": 70.0, "measured_in": "mine rows", "baseline": 50.0}
    write_submission(run.base, run.sub, values(2).items(), record)
    run.found = {"submission": GOOD, "average": BEST}
    assert run.finalize() == 0
    assert list(run.held)[:4] == ["base", "submission", "update 10", "average"]
    assert same_weights(run.held["submission"], mixture_of(run.base, {2: 1}))
    got = read_record(run.sub)
    assert (got["measured_in"], got["baseline"], got["score_to_beat"]) == ("mine rows", 50.0, 70.0)


@pytest.mark.parametrize("out_of_time, chosen", [("average", "update 10"), ("0.25 x update 10", "update 10")])
def test_the_time_is_up(run, out_of_time, chosen):
    """The best of what was scored; and the same command looks at all of them."""
    run.found = {"update 10": GOOD, out_of_time: None}
    assert run.finalize() == 0
    assert run.result["submitted"] == chosen and not run.result["complete"]
    assert run.status["cause"] == "deadline" and run.status["exit_code"] == 0
    assert list(run.held)[-1] == out_of_time and out_of_time not in run.result["candidates"]
    run.found[out_of_time] = BEST
    run.found["submission"] = GOOD
    assert run.finalize() == 0
    assert run.result["complete"]


def test_the_time_is_up_before_anything_is_known(run, capsys):
    before = contents(run.sub)
    run.found = {"base": None}
    assert run.finalize() == 1
    assert "the time was over before the base" in capsys.readouterr().err
    assert contents(run.sub) == before and run.status["exit_code"] == 1


def test_rows_are_given_up_once_the_time_is_up(run, monkeypatch):
    """With the real scoring: no rows are missed in silence."""
    monkeypatch.undo()
    monkeypatch.setattr(finalize, "launch", lambda args, sets, job: job(0, 1, args, sets))
    run.monkeypatch = monkeypatch
    assert run.finalize("--dataloader_num_workers", 0, "--minutes", 0) == 1
    assert not (run.out / "finalize.json").exists()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("where", ["while scoring", "while writing", "after the exchange"])
def test_a_kill_leaves_a_whole_model_and_the_same_command_ends_it(run, where):
    run.found = {"update 10": GOOD, "average": BEST}
    before = contents(run.sub)

    def start() -> None:
        if where == "while scoring":
            run.measure_again, calls = run.measure, []
            finalize.measure = lambda *a: (calls.append(1), len(calls) == 3 and kill(), run.measure(*a))[2]
        else:
            write = submission._rounded_bytes if where == "while writing" else submission.install
            dying = (lambda *a: kill()) if where == "while writing" else (lambda *a: (write(*a), kill()))
            setattr(submission, write.__name__, dying)
        run.finalize()

    assert status_of(start) == signal.SIGKILL
    if where == "after the exchange":
        assert read_record(run.sub)["mixture"] == {"update 10": 0.5, "update 20": 0.5}
    else:
        assert contents(run.sub) == before
    load_policy(run.sub, torch.bfloat16)
    run.found["submission"] = BEST
    assert run.finalize() == 0 and run.result["complete"]
    assert read_record(run.sub)["mixture"] == {"update 10": 0.5, "update 20": 0.5}
    assert {path.name for path in run.sub.parent.iterdir()} == {
        "out", "submission", "submission.record.json", ".submission.lock"
    }  # fmt: skip


def test_what_cannot_be_is_refused_in_a_sentence(run, capsys):
    def refused(*flags) -> str:
        assert run.finalize(*flags) == 1
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "--limit 0" in refused("--limit", 0)
    assert "would overwrite the base" in refused("--submission", run.base)
    assert "--minutes nan" in refused("--minutes", "nan")
    assert "--dataloader_num_workers -1" in refused("--dataloader_num_workers", -1)
    plan = json.loads((run.out / "selection.json").read_text())
    for wrong, words in (
        ({"rows": {"val": [0, 99]}}, "rows, fewer than the run was measured on"),
        ({"base": str(run.out)}, "the run's base is not what it was"),
        ({"sets": {}}, "is not what a run with --submission_dir writes"), (None, "is not what a run"),
    ):  # fmt: skip
        (run.out / "selection.json").write_text(json.dumps(wrong and plan | wrong))
        assert words in refused() and run.status["cause"] == "failed"
    run.out = run.out.parent / "nowhere"
    assert "has no readable selection.json" in refused()
    assert not run.out.exists()


def test_what_is_damaged_is_left_out_and_named(run, capsys):
    """Of the masters; a result that cannot be read is none."""
    other = run.out / "masters/update-40.safetensors"
    about = {"run": "mine", "step": "40", "score": "99"}
    write_masters(other, {"a": (2,)}, [("a", torch.zeros(2))], about)
    os.truncate(run.out / "masters/update-20.safetensors", 1000)
    (run.out / "finalize.json").write_text("[]")
    run.found = {"update 10": GOOD}
    assert run.finalize() == 0 and run.result["submitted"] == "update 10"
    assert run.held.keys() == {"base", "update 10", "0.5 x update 10", "0.25 x update 10"}
    shown = capsys.readouterr().out
    assert "left out: " in shown and "update-20.safetensors" in shown and f"{other} has not the tens" in shown


def test_a_fault_of_the_code_does_not_look_as_if_it_ran_on(run, monkeypatch):
    monkeypatch.setattr(finalize, "measure", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.finalize()
    assert run.status["cause"] == "failed" and "ZeroDivisionError" in run.status["message"]


def test_two_processes_find_what_one_does(tmp_path):
    """Real scores, of the demo's base and of what noise makes of it."""
    base = ROOT / "methods/demo/base"
    for name in ("val", "ood"):
        drawn = [draw.draw_row(name, 0, row)[0] for row in range(8)]
        features = Features({column: Value("string") for column in drawn[0]} | {"image": Image()})
        Dataset.from_list(drawn, features=features).save_to_disk(tmp_path / name)
    shapes = {name: places[0].shape for name, places in tensor_slots(base).items()}
    held, noise = load_policy(base, torch.float32).state_dict(), torch.Generator().manual_seed(0)
    found = []
    for processes in (1, 2):
        out = tmp_path / f"out_{processes}"
        for step, size in ((10, 0.001), (20, 0.003)):
            noised = (
                (n, held[n].float() + size * torch.randn(s, generator=noise.manual_seed(step)))
                for n, s in shapes.items()
            )
            about = {"run": "mine", "step": str(step), "score": "1"}
            write_masters(out / f"masters/update-{step}.safetensors", shapes, noised, about)
        plan = {
            "run": "mine", "measured_in": "mine rows", "base": str(base), "submission": str(out / "best"),
            "sets": {name: str(tmp_path / name) for name in ("val", "ood")}, "split": ["train", None],
            "rows": {"val": list(range(8)), "ood": list(range(0, 8, 2))}, "level": 0.01, "minutes": 15,
            "alphas": [0.5],
        }  # fmt: skip
        (out / "selection.json").write_text(json.dumps(plan))
        command = [sys.executable, ROOT / "open_r1/finalize.py", out, "--num_processes", str(processes)]
        command += ["--batch_size", "4", "--dataloader_num_workers", "0"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(json.loads((out / "finalize.json").read_text()))
    one, two = found
    assert one["candidates"] == two["candidates"] and one["submitted"] == two["submitted"]
    assert one["complete"] and len({each["score"] for each in one["candidates"].values()}) > 1
    assert (tmp_path / "out_1/best/model.safetensors").read_bytes() == (
        tmp_path / "out_2/best/model.safetensors"
    ).read_bytes()
