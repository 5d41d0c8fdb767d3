"""Arms that differ in the named flags only, and how they are compared."""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from methods.arms import binding, paired, plan, readouts, report, run
from methods.demo import draw
from open_r1 import lock
from tests.faults import status_of

SHARED = {"max_steps": 5, "eval_steps": 5, "eval_limit": 20}


def write_set(folder: Path, text: str) -> str:
    (folder / "mine.yaml").write_text(text)
    return str(folder / "mine.yaml")


# --- which arms may be compared


@pytest.mark.parametrize("name", sorted(file.stem for file in plan.SETS.glob("*.yaml")))
def test_the_sets_differ_in_named_flags_only(name):
    """By the real parser, on the flags that bash makes of train.sh and methods/demo/train.sh."""
    arms = plan.load_set(name)
    plan.check_flags(arms, SHARED)
    line = plan.command_line(arms.arms[arms.reference], 3, SHARED, Path("out"), arms.study)
    rate = 3e-5 if arms.study.gpu else 1.5e-4  # the last one is the study's
    assert line[-2:] == ["--seed", "3"] and line[line.index("--num_generations") + 1] == "8"
    assert float(plan.given(line, "learning_rate")) == rate and ("--use_cpu" in line) != arms.study.gpu


def test_what_a_command_line_gives():
    line = ["--a", "1", "--b", "x", "y", "--a", "2.0", "--c"]
    assert [plan.given(line, flag) for flag in "abcd"] == [2.0, ["x", "y"], True, None]
    assert report.in_recipe({"flags": {"beta": 0, "reward_funcs": ["accuracy", "format"]}}) == "yes"
    assert report.in_recipe({"flags": {"beta": 0.04}}) == "no" == report.in_recipe({"flags": {"no_such": 1}})


def test_an_arm_with_another_flag_is_refused(tmp_path):
    text = "reference: a\nmay_differ: [beta]\narms: {a: {}, b: {flags: {learning_rate: 1.0e-5}}}"
    with pytest.raises(plan.Refused, match="arm b sets --learning_rate, which is not in may_differ"):
        plan.load_set(write_set(tmp_path, text))
    text = text.replace("learning_rate: 1.0e-5", "no_such_flag: 1").replace("[beta]", "[no_such_flag]")
    with pytest.raises(plan.Refused, match="arm b of mine: --no_such_flag is no flag"):
        plan.check_flags(plan.load_set(write_set(tmp_path, text)), SHARED)
    # A flag that changes another one behind it: what the parser makes of it counts.
    text = text.replace("no_such_flag: 1", "gradient_accumulation_steps: 2")
    text = text.replace("[no_such_flag]", "[gradient_accumulation_steps]")
    with pytest.raises(plan.Refused, match="steps_per_generation 2 where a has 4"):
        plan.check_flags(plan.load_set(write_set(tmp_path, text)), SHARED)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("reference: a\nmay_differ: [beta\narms: {a: {}}", "is no set of arms"),
        ("", "is no set of arms"),
        ("reference: a\nmay_differ: [beta]\narms: {a: {}, ../b: {}}", "arm ../b: it names a folder"),
        ("reference: a\nmay_differ: [beta]\narms: {a: {}, 3: {}}", "arm 3: it names a folder"),
        ("reference: a\nmay_differ: [beta]\narms: {a: {}, base: {}}", "arm base: that is what"),
        ("reference: a\nmay_differ: [beta]\narms: {a: {}, b: {flags: [beta]}}", "arm b: flags ['beta']"),
        ("reference: a\nmay_differ: seed\narms: {a: {}, b: {flags: {seed: 1}}}", "arm b sets --seed, which"),
        ("reference: b\nmay_differ: [beta]\narms: {a: {}, b: {kind: sft}}", "reference b is none of its"),
        ("reference: a\nmay_differ: [beta]\narms: {a: {}, b: {after: a}}", "arm b: after a; set an arm"),
    ],
)
def test_what_is_no_set_is_refused_in_a_sentence(tmp_path, text, words):
    with pytest.raises(plan.Refused) as refused:
        plan.load_set(write_set(tmp_path, text))
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "flags", ["--jobs 0", "--wall -5", "--seeds 0 0", "--test_limit 0", "--readout_rows 1", "--only nobody"]
)
def test_numbers_without_a_meaning_are_refused(tmp_path, monkeypatch, capsys, flags):
    words = ["run.py", "--arms", "objectives", "--out", str(tmp_path / "out"), *flags.split()]
    monkeypatch.setattr(sys, "argv", words)
    assert run.main() == 2 and flags in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_run_of_other_rows_is_refused(tmp_path):
    arms = plan.load_set(write_set(tmp_path, "reference: a\nmay_differ: [beta]\narms: {a: {}, b: {}}"))
    one = {"flags": {"beta": 0}, "model": {"content": "m"}, "data": {"train": {"rows": 9, "content": "d"}}}
    plan.refuse_other_material("b", one, one | {"flags": {"beta": 1}}, arms)
    for other in (
        {"model": {"content": "n"}}, {"data": {"train": {"rows": 8, "content": "d"}}}, {"flags": {"beta": 0,
        "x": 1}}
    ):  # fmt: skip
        with pytest.raises(plan.Refused):
            plan.refuse_other_material("b", one, one | other, arms)
    text = "reference: a\nmay_differ: [beta]\narms: {a: {}, s: {kind: sft}, b: {after: s}}"
    arms = plan.load_set(write_set(tmp_path, text))
    plan.refuse_other_material("b", one, one | {"model": {"content": "n"}}, arms)
    with pytest.raises(plan.Refused, match="another data"):
        plan.refuse_other_material("b", one, one | {"data": {"train": {"rows": 8, "content": "d"}}}, arms)


def test_an_arm_after_another_starts_from_its_model_of_the_same_seed(tmp_path):
    more = "{a: {}, s: {kind: sft, column: solution}, b: {after: s}, t: {kind: sft, after: s}, "
    more += "u: {kind: sft, as_many_rows: true}}"
    arms = plan.load_set(write_set(tmp_path, f"reference: a\nmay_differ: [beta]\narms: {more}"))
    args = argparse.Namespace(
        out=tmp_path, seeds=[3], max_steps=5, eval_steps=5, eval_limit=10, test_limit=None, readout_rows=8
    )
    todo = {job.todo["arm"]: job.todo for job in run.make_jobs([arms], args)}
    made = str(tmp_path / "s/seed_3/run")
    assert plan.given(todo["a"]["command"], "model_name_or_path") == str(plan.BASE) == todo["s"]["start"]
    assert plan.given(todo["b"]["command"], "model_name_or_path") == made == todo["t"]["start"]
    assert (todo["s"]["column"], todo["t"]["column"]) == ("solution", "completion")
    assert todo["t"]["as_long_as"] == "a" and todo["t"]["after"] == "s" and "after" not in todo["s"]
    assert todo["u"]["steps"] == 5 and "as_long_as" not in todo["u"] and "steps" not in todo["s"]


# --- running them


class FakeJobs:
    """Jobs that are `python -c CODE`."""

    def __init__(self, folder: Path, monkeypatch):
        self.folder = folder
        real = subprocess.Popen
        monkeypatch.setattr(
            run.subprocess,
            "Popen",
            lambda command, **how: real(
                [sys.executable, "-c", (command[2] / "code").read_text()], **how | {"cwd": command[2]}
            ),
        )

    def add(self, arm: str, code: str, **todo) -> run.Job:
        job = run.Job(self.folder / arm / "seed_0", {"arm": arm, "seed": 0} | todo)
        run.claim([job], self.folder)
        (job.folder / "code").write_text(code)
        return job


DONE = "open('result.json', 'w').write('{}')"


def test_jobs(tmp_path, monkeypatch, capsys):
    """A failed one is shown and the others go on, the control waits for its reference, and what would not end
    in time is cut or not started."""
    fake = FakeJobs(tmp_path, monkeypatch)
    jobs = [
        fake.add("control", DONE, as_long_as="slow"),
        fake.add("next", DONE, after="control"),
        fake.add("broken", "raise SystemExit('what went wrong')"),
        fake.add("slow", f"import time; time.sleep(0.3); {DONE}"),
        fake.add("endless", "import time; time.sleep(60)"),
    ]
    args = argparse.Namespace(jobs=3, wall=run.GRACE + 4, job_seconds=3, begin=time.monotonic())
    run.run_jobs(jobs, args, lambda: None)
    text = capsys.readouterr().out
    assert text.index("done   slow") < text.index("start  control") < text.index("done   control")
    assert text.index("done   control") < text.index("start  next") < text.index("done   next")
    assert "FAILED broken" in text and "what went wrong" in text
    assert "cut    endless" in text and jobs[4].process.returncode == -9
    late = fake.add("late", DONE)
    run.run_jobs(
        [late],
        argparse.Namespace(jobs=1, wall=run.GRACE + 2, job_seconds=3, begin=time.monotonic()),
        lambda: None,
    )
    assert "not run: late, seed 0: no time" in capsys.readouterr().out and late.process is None
    left = fake.add("left", "import time; time.sleep(60)")
    monkeypatch.setattr(run.time, "sleep", lambda _: 1 / 0)  # the runner itself dies
    with pytest.raises(ZeroDivisionError):
        run.run_jobs([left], argparse.Namespace(jobs=1, wall=None, begin=0, job_seconds=3), lambda: None)
    assert left.process.returncode == -9
    with pytest.raises(plan.Refused, match="other settings"):
        run.claim([run.Job(late.folder, late.todo | {"max_steps": 7})], tmp_path)


def test_a_folder_is_one_runners_and_holds_jobs_only(tmp_path):
    """Nothing is written where one of the jobs is refused."""
    notes = tmp_path / "b/seed_0/notes.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("somebody's")
    jobs = [run.Job(tmp_path / arm / "seed_0", {"arm": arm, "seed": 0}) for arm in "ab"]
    with pytest.raises(plan.Refused, match="b/seed_0 holds something that is no job"):
        run.claim(jobs, tmp_path)
    assert not jobs[0].folder.exists() and notes.exists()
    run.claim(jobs[:1], tmp_path)

    def refused() -> None:
        lock._held.clear()  # of the other process
        with pytest.raises(plan.Refused, match="another run.py works in"):
            run.claim(jobs[:1], tmp_path)

    assert status_of(refused) == 0
    with pytest.raises(plan.Refused, match="cannot be written"):
        run.claim(jobs[:1], Path("/proc/nowhere"))


def test_jobs_end_with_a_runner_that_is_killed(tmp_path, monkeypatch):
    """The next one begins them anew, in the same folders."""
    fake = FakeJobs(tmp_path, monkeypatch)
    job = fake.add("endless", "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(60)")
    pid = job.folder / "pid"

    def runner() -> None:
        run.start(job)
        while not (pid.exists() and pid.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    assert status_of(runner) == signal.SIGKILL
    stat, end = Path("/proc") / pid.read_text() / "stat", time.monotonic() + 10
    while stat.exists() and stat.read_text().split()[2] != "Z":  # nobody may be there to reap it
        assert time.monotonic() < end
        time.sleep(0.01)


# --- comparing them


def test_mcnemar():
    assert paired.mcnemar(0, 0) == 1.0
    # 1 of 6: two-sided 2 (C(6,0) + C(6,1)) / 64 = 14/64; the mid-p leaves C(6,1) / 64 out.
    assert paired.mcnemar(5, 1) == paired.mcnemar(1, 5) == pytest.approx(8 / 64)
    assert paired.mcnemar(2, 2) == pytest.approx(1 - 6 / 32)
    assert paired.mcnemar(900, 700) < 1e-5


def test_comparison():
    """Two seeds, gains of 10 and 30 points on one set, half of that over two."""
    reference = {"a": np.zeros((2, 10), int), "b": np.ones((2, 4), int)}
    arm = {"a": reference["a"].copy(), "b": reference["b"]}
    arm["a"][0, 0] = arm["a"][1, 0] = arm["a"][1, 1] = arm["a"][1, 2] = 1
    found = paired.compare(arm, reference)
    assert (found.effect, found.by_seed, found.better, found.worse) == (10.0, [5.0, 15.0], 4, 0)
    assert found.seeds == pytest.approx((10 - 12.706 * 5, 10 + 12.706 * 5))
    # Rows with gains of 1, .5, .5 and seven zeros, resampled: mean .2, standard deviation sqrt(.011).
    half = 1.96 * 100 * math.sqrt(0.11 / 10) / 2
    assert found.rows == pytest.approx((10 - half, 10 + half), abs=1.6)
    assert paired.compare(reference, reference).effect == 0


@pytest.mark.parametrize(
    ("rows", "seeds", "verdict"),
    [
        ((1, 9), (2, 8), "better"),
        ((-9, -1), (-8, -2), "worse"),
        ((1, 9), (-8, 18), "better with these seeds"),
        ((-9, -1), None, "worse with these seeds"),
        ((-1, 9), (-8, 18), "no difference shown"),
    ],
)
def test_verdict(rows, seeds, verdict):
    assert paired.Comparison(5.0, [5.0], rows, seeds, 0, 0, 1.0).verdict == verdict


def results_file(**changed) -> dict:
    def result(arm, seed, bits):
        numbers = {name: {"parsed_pct": 100.0, "mean_tokens": 9.0} for name in report.SETS}
        numbering = {"labels_right": 50.0, "chance": 30.0, "bound_of_correct": None}
        return {
            "arm": arm, "kind": "grpo", "seed": seed, "seconds": {"update": 10.0 + seed, "updates": 50.0},
            "curve": [{"step": 0, "score": 1.0}],
            "models": {"submission": {"rows": dict.fromkeys(report.SETS, bits), "numbers": numbers}},
            "readouts": {
                "kl": {"k3": 0.1, "far": 0.02}, "image": {"gap": 20.0},
                "printed": {"right": 20.0, "both": 0.0, "chance": 20.0},
                "numbering test_val": numbering, "numbering test_ood": numbering,
            },
        }  # fmt: skip

    results = [result("a", seed, "0011") for seed in (0, 1)] + [result("b", seed, "0111") for seed in (0, 1)]
    results.append(result("base", 0, "0001"))
    shown_to = result("s", 0, "0000") | {"kind": "sft", "steps": 7}
    nothing = {"labels_right": None, "chance": None, "bound_of_correct": None}  # it writes no numerals
    shown_to["readouts"] |= {"numbering test_val": nothing, "numbering test_ood": nothing}
    results.append(shown_to)
    arms = {
        "a": {"what": "one", "flags": {}},
        "b": {"what": "other", "flags": {"beta": 0.5}},
        "c": {"what": "", "flags": {}},
        "s": {"what": "shown how", "flags": {}},
    }
    made = {
        "commit": "c0ffee", "date": "2026-01-01", "machine": "a machine", "command": "run", "max_steps": 5,
        "eval_limit": 20,
        "sets": [{"name": "mine", "reference": "a", "may_differ": ["beta"], "arms": arms}],
        "missing": ["c, seed 0"], "refused": {}, "results": results,
    }  # fmt: skip
    return made | changed


def test_a_set_is_compared_within_the_files_that_name_it():
    """Validated more often, say, the reference of another file is another."""
    other = results_file()
    other["sets"][0]["name"] = "another"
    for result in other["results"]:
        result["models"]["submission"]["rows"] = dict.fromkeys(report.SETS, "1111")
    mine, another = report.merge([results_file(), other])["sets"]
    assert "| a | 2 | 50.0 |" in report.effects(mine, mine["results"])
    assert "| a | 2 | 100.0 |" in report.effects(another, another["results"])


def test_what_comes_after_the_same_sft_is_compared():
    made = results_file()
    for result in made["results"]:
        kind = {"a": {"kind": "sft"}, "b": {}}.get(result["arm"])
        result |= {} if kind is None else {"after": "s"} | kind
    (mine,) = report.merge([made])["sets"]
    text = report.after_the_same(mine, mine["results"])
    assert "| b, last | a | +25.0 (+25.0 to +25.0) |" in text
    assert text.count("| b, ") == 2 and "| a, " not in text


def test_the_gate():
    """What each level would have let through, and what that gains over the model that a run began from."""
    made = results_file()
    for result in made["results"]:
        if result["arm"] in "ab":
            sure = {"a": 0.85, "b": 0.95}[result["arm"]]
            result["curve"].append({"step": 5, "score": 2.0, "confidence": sure})
            result["max_steps"] = 5
    text = report.gate(report.merge([made]))
    assert "Had each of\nthe 4 runs above offered its last model alone, on 20 rows" in text
    assert "| 0.8 | 4 | +37.50 | 0 | +25.0 | 0 (-0.00) |" in text  # two of +25, two of +50
    assert "| 0.9 | 2 | +25.00 | 0 | +50.0 | 2 (-12.50) |" in text
    assert "| 0.99 | 0 | +0.00 | 0 | – | 4 (-37.50) |" in text
    assert report.gate(report.merge([results_file()])) == ""


def test_report(tmp_path):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results_file()))
    command = [sys.executable, report.__file__, path, "--out", tmp_path / "docs"]
    (tmp_path / "docs/evidence").mkdir(parents=True)
    (tmp_path / "docs/evidence/findings.md").write_text("b is better.\n")
    subprocess.run(command, check=True, timeout=120)
    text = (tmp_path / "docs/evidence.md").read_text()
    assert "| a | 2 | 50.0 | 50.0 | 50.0 | 50.0 | 50.0 | reference |" in text
    assert "| b | 2 | 75.0 | 75.0 | 75.0 | 75.0 | 75.0 | +25.0 | +25.0 to +25.0 |" in text
    assert "| base | 1 | 25.0 | 25.0 | 25.0 | 25.0 | 25.0 | -25.0 | -25.0 to -25.0 |" in text
    assert "| b | +25.0 (+25.0 to +25.0) |" in text
    assert "\n\n## Findings\n\nb is better.\n\n## Mine\n" in text
    assert "Steps of SFT: s 7 in 50 s. The updates of a took 50, 50 s." in text
    assert "| c | 0 |" in text and "not run: c, seed 0" in text and "Commit c0ffee, 2026-01-01" in text
    assert "| b | 0.100 | 2.0 | 20.0 | 50.0 | 50.0 | – |" in text
    assert (tmp_path / "docs/evidence/mine_effects.png").stat().st_size > 5000
    with pytest.raises(SystemExit, match="cannot stand in one table"):
        report.merge([results_file(), results_file(max_steps=6)])
    other = results_file()
    other["results"][0]["models"]["submission"]["rows"] = dict.fromkeys(report.SETS, "01")
    with pytest.raises(SystemExit, match="cannot be compared"):
        report.page(report.merge([other]), tmp_path)
    for text, words in (
        ("{", "is no results.json"), ("[]", "is no results.json"), ('{"results": []}', "is done yet"),
    ):  # fmt: skip
        path.write_text(text)
        with pytest.raises(SystemExit, match=words):
            report.read([path])


# --- readouts


def test_kl_readout():
    """k3 and k1 of two tokens by hand; the mean of k3 over samples of the policy is the KL."""
    found = readouts.kl_readout(torch.tensor([-1.0, -0.5]), torch.tensor([-3.0, -0.5]))
    assert found == pytest.approx({"k1": 1.0, "k3": (math.exp(-2) + 1) / 2, "far": 0.5})
    policy, base = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    tokens = torch.multinomial(policy, 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    found = readouts.kl_readout(policy.log()[tokens], base.log()[tokens])
    exact = float((policy * (policy / base).log()).sum())
    assert found["k3"] == pytest.approx(exact, abs=0.01) and found["k1"] == pytest.approx(exact, abs=0.01)


def test_numbering():
    things = draw.draw_row("test_val", 0, 0)[1]
    shown = draw.demonstration(things)
    found = readouts.numbering([shown], [shown])
    assert found == {
        "labels_right": 100, "chance": 100 * len(things) / 16, "objects_labelled": 100, "bound": 100,
        "bound_of_correct": 100,
    }  # fmt: skip
    gold = "<think> 1 a1 2 b2 </think> <answer> 2 </answer>"
    right_by_accident = "<think> 1 a1 2 c3 </think> <answer> 2 </answer>"
    twice = "<think> 1 a1 2 a1 </think> <answer> 2 </answer>"
    nothing = "<think> none </think> <answer> 0 </answer>"
    found = readouts.numbering([right_by_accident, twice, gold, nothing], [gold, gold, gold, nothing])
    assert found["labels_right"] == pytest.approx(400 / 6) and found["bound"] == pytest.approx(100 / 3)
    assert found["bound_of_correct"] == pytest.approx(100 / 3)


def test_figures_come_in_pairs():
    for number in range(20):
        first, second = binding.pair(0, number)
        assert first.question == second.question and first.number != second.number
        assert sorted(first.numbers) == sorted(second.numbers) and first.number in first.numbers
        assert all(a != b for a, b in zip(first.numbers, second.numbers, strict=True))
        assert (
            first.image.size == (binding.SIDE, binding.SIDE)
            and first.image.tobytes() != second.image.tobytes()
        )


class Told:
    """An engine that reads the numbers of the figures from `answers`."""

    def __init__(self, answers):
        self.answers = iter(answers)

    def generate(self, prompts, num_generations, sampling):
        return [[argparse.Namespace(text=f"<answer> {next(self.answers)} </answer>")] for _ in prompts]


def test_the_probe_tells_binding_from_a_liking(tmp_path):
    from open_r1.checkpoint import load_policy
    from open_r1.processor import load_processor

    processor, config = load_processor(plan.BASE), load_policy(plan.BASE, torch.float32).config
    figures = [figure for number in range(5) for figure in binding.pair(0, number)]
    how = {"figures": 5, "seed": 0, "new_tokens": 8}
    found = binding.probe(Told([f.number for f in figures]), processor, config, **how, out=tmp_path / "drawn")
    assert (found["right"], found["both"], found["parsed"]) == (100, 100, 100)
    assert len((tmp_path / "drawn/figures.jsonl").read_text().splitlines()) == 10
    liked = [
        figures[number // 2 * 2].number for number in range(10)
    ]  # the first picture's, for both of a pair
    found = binding.probe(Told(liked), processor, config, **how)
    assert (found["right"], found["both"], found["a_label"]) == (50, 0, 100)


@pytest.mark.parametrize("page", [*report.DOCS.glob("evidence.md"), *plan.ROOT.glob("methods/*/evidence.md")])
def test_the_evidence_is_what_the_json_files_say(page, tmp_path):
    files = [json.loads(path.read_text()) for path in sorted((page.parent / "evidence").glob("*.json"))]
    shutil.copytree(page.parent / "evidence", tmp_path / "evidence")
    assert page.read_text() == report.page(report.merge(files), tmp_path / "evidence")
