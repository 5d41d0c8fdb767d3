"""The READMEs of the label-free recipes, made from the results of arms."""

import json
import sys

from methods.arms import label_free, report


def result(arm: str, seed: int, last: float) -> dict:
    def of(accuracy: float) -> dict:
        return {"numbers": {name: {"accuracy_pct": accuracy} for name in report.SETS}}

    log = [
        {"step": step, "reward": step / 10, "completions/correct": 0.3, "completions/parsed": parsed,
         "collapse": collapse}
        for step, parsed, collapse in ((5, 0.9, 0.0), (10, 0.4, 0.2), (15, 0.1, 1.0))
    ]  # fmt: skip
    curve = [{"step": step, "score": score} for step, score in ((0, 30.0), (5, 50.0), (10, 20.0), (15, last))]
    models = {"submission": of(48.0), "last": of(last)}
    return {
        "arm": arm, "seed": seed, "models": models, "submitted_step": 5, "log": log, "curve": curve,
        "seconds": {"update": 2.0 if arm == "rent" else 1.0},
    }  # fmt: skip


def test_tables_and_plot(tmp_path, monkeypatch):
    results = [result(arm, seed, 10.0 + seed) for arm in ("main", "rent", "rent_kl") for seed in (0, 1)]
    after = result("sft_then_rent", 1, 12.0) | {"after": "sft"}
    results += [after, result("sft", 1, 0.0)]
    untrained = {"submission": result("base", 0, last=0.0)["models"]["last"]}
    results.append({"arm": "base", "seed": 0, "models": untrained, "seconds": {}})
    made = {"sets": [{"name": "label_free", "arms": {}}], "results": results, "max_steps": 15}
    made |= {"commit": "abc", "date": "today", "machine": "two cores", "command": "run.py"}
    made |= {"missing": [], "refused": {}}
    slow = result("main", 0, 10.0) | {"seconds": {"update": 9.0}}  # on another machine, and counts
    other = made | {"results": [slow], "commit": "def"}
    for name, file in {"1": made, "2": other}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(file))
    (tmp_path / "rent").mkdir()
    readme = tmp_path / "rent/README.md"
    readme.write_text("before\n<!-- results -->\nold\n<!-- end of results -->\nafter\n")
    words = [tmp_path / "1.json", tmp_path / "2.json", "--readmes", tmp_path, "--pictures", tmp_path]
    monkeypatch.setattr(sys, "argv", ["label_free.py", *map(str, words)])
    label_free.main()
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| rent | 1 | 0.0 | 48.0 | 5 | 11.0 | 10 | 10 % | 30 % to 30 % | 0.50 to 1.50 |" in text
    assert "An update takes 2.00 times main's" in text  # of the machine that rent ran on
    assert "- Commit abc" in text and "- Commit def" in text
    assert "| sft_then_rent | 1 | 48.0 | 48.0 | 5 | 12.0 | 10 |" in text  # from what was submitted of sft
    for name in label_free.PICTURES.values():
        assert (tmp_path / name).stat().st_size > 10_000
