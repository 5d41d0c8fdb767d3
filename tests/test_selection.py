"""selection.py: the paired bootstrap against its exact probabilities, the choice, the rows that choose."""

import json
import math
import sys

import pytest
from datasets import DatasetDict

from open_r1 import selection
from open_r1.curve import Curve
from open_r1.selection import Outcome, choose, confidence, gains, refuse_strange, rows_of
from tests.data_sets import table


def outcome(**sets: str) -> Outcome:
    """A set's rows as a text: 1 is right."""
    rows = {name: enumerate(marks) for name, marks in sets.items()}
    return Outcome({name: {row: mark == "1" for row, mark in marked} for name, marked in rows.items()})


def test_the_bootstrap_agrees_with_the_exact_probability():
    """Of n rows, 3 won and 1 lost, the others tied: a sample's wins and losses are multinomial."""
    n = 20
    base, better = outcome(val="0001" + "1" * 16), outcome(val="1110" + "1" * 16)
    exact = sum(
        math.comb(n, won) * math.comb(n - won, lost) * 0.15**won * 0.05**lost * 0.8 ** (n - won - lost)
        for won in range(n + 1)
        for lost in range(min(won, n - won + 1))
    )
    assert confidence(better, base) == pytest.approx(exact, abs=0.015)
    assert confidence(base, better) < 1 - exact + 0.015
    assert gains(better, base).mean() == pytest.approx(10, abs=0.3)  # 2 of 20 rows
    assert gains(better, base).std() == pytest.approx(100 * math.sqrt((0.2 - 0.01) / n), rel=0.05)


def test_sets_weigh_the_same_and_are_drawn_apart():
    base = outcome(val="0" * 100, ood_val="0" * 10)
    better = outcome(val="0" * 100, ood_val="1" * 5 + "0" * 5)
    assert better.score - base.score == 25 and gains(better, base).mean() == pytest.approx(25, abs=0.5)
    assert confidence(better, base) == pytest.approx(1 - 0.5**10, abs=0.003)


def test_pairs_are_compared_not_means():
    """The same two accuracies: certain where the better one has all that the other has, else not."""
    base = outcome(val="1" * 50 + "0" * 50)
    contained, disjoint = outcome(val="1" * 56 + "0" * 44), outcome(val="0" * 44 + "1" * 56)
    assert confidence(contained, base) > 0.99 and 0.6 < confidence(disjoint, base) < 0.8
    assert confidence(base, base) == 0.0  # equal is not better


def test_other_rows_are_not_compared():
    with pytest.raises(ValueError, match="same rows of val"):
        gains(outcome(val="01"), outcome(val="011"))
    with pytest.raises(ValueError, match="not comparable"):
        gains(outcome(val="01"), outcome(val="01", ood_val="1"))


LUCK = outcome(val="0" * 44 + "1" * 56)  # higher, and not surely so
SURE = outcome(val="1" * 54 + "0" * 46)


@pytest.mark.parametrize(
    "candidates, level, expected",
    [
        ({}, 0.9, "base"),
        ({"update 1": LUCK}, 0.9, "base"),
        ({"update 1": LUCK}, 0.0, "update 1"),
        ({"update 1": LUCK, "average": SURE}, 0.9, "average"),  # though it scores less
        ({"submission": SURE, "update 1": SURE}, 0.9, "submission"),  # on equal scores what stands there
        ({"submission": SURE, "update 1": LUCK}, 0.9, "submission"),
        ({"submission": LUCK}, 0.9, "submission"),  # only a better one takes its place
        ({"submission": outcome(val="1" * 49 + "0" * 51)}, 0.9, "base"),  # the base is one
        ({"submission": outcome(val="1" * 49 + "0" * 51), "update 1": LUCK}, 0.9, "base"),
    ],
)
def test_the_choice(candidates, level, expected):
    base = outcome(val="1" * 50 + "0" * 50)
    assert choose({"base": base} | candidates, level) == expected


def test_what_chooses_never_reports(tmp_path, monkeypatch, capsys):
    folder, out = tmp_path / "ood_val", tmp_path / "rows.json"
    table().save_to_disk(folder)

    def run(*arguments) -> int:
        monkeypatch.setattr(sys, "argv", ["selection.py", *map(str, arguments)])
        return selection.main()

    assert run(folder, "--out", out) == 0
    assert "ood_val: 2 rows choose, 2 report" in capsys.readouterr().out
    first = out.read_bytes()
    parts = [rows_of(str(out), str(folder), 4, part=part) for part in ("selection", "report")]
    assert sorted(parts[0] + parts[1]) == [0, 1, 2, 3] and len(parts[0]) == 2
    assert rows_of(str(out), str(tmp_path / "val"), 3) == [0, 1, 2]  # a set that it does not name
    assert rows_of(str(out), str(folder), 4, limit=1) == parts[0][:1]
    assert run(folder, "--out", out) == 2 and "exists" in capsys.readouterr().err
    out.unlink()
    assert run(folder, "--out", out) == 0 and out.read_bytes() == first  # by the seed alone
    assert run(folder, "--out", tmp_path / "other", "--share", 0.1) == 2
    assert "leaves no rows" in capsys.readouterr().err
    with pytest.raises(ValueError, match="splits 4 rows, and .* has 5: split it anew"):
        rows_of(str(out), str(folder), 5)
    for rows in ([], [4], [-1], "01", [[0]]):
        out.write_text(json.dumps({"ood_val": {"rows": 4, "selection": rows, "report": [0]}}))
        message = f"^{out} (names rows to selection that .* lacks, or none|is no file)"
        with pytest.raises(ValueError, match=message):
            rows_of(str(out), str(folder), 4)
    out.write_bytes(first)
    refuse_strange(str(out), [])
    refuse_strange(None, [str(folder)])
    refuse_strange(str(out), [str(folder), str(tmp_path / "val")])
    with pytest.raises(ValueError, match="splits ood_val, and not val"):
        refuse_strange(str(out), [str(tmp_path / "val")])
    DatasetDict(train=table(), test=table().select(range(2))).save_to_disk(tmp_path / "both")
    for more, rows in ((), 2), (("--split", "train"), 4):
        assert run(tmp_path / "both", "--out", tmp_path / f"{rows}.json", *more) == 0
        assert json.loads((tmp_path / f"{rows}.json").read_text())["both"]["rows"] == rows
    out.write_text("[]")
    with pytest.raises(ValueError, match="is no file of open_r1/selection.py"):
        rows_of(str(out), str(folder), 4)


def test_the_curve_goes_on_after_the_checkpoint_and_keeps_runs_apart(tmp_path):
    curve = Curve(tmp_path, "run1 rows")
    curve.begin(0)
    for step, name in enumerate(("base", "update 1", "update 2")):
        curve.add(name, step, 50.0, outcome(val="01"), None)
    curve.begin(1)
    assert curve.find("update 1") == outcome(val="01") and curve.find("update 2") is None
    assert Curve(tmp_path, "run1 other").find("update 1") is None
    with curve.path.open("a") as file:
        file.write('{"name": "ba')  # killed
    assert curve.find("base") == outcome(val="01")
    Curve(tmp_path, "run2 rows").begin(0)
    assert not curve.path.exists() and len((tmp_path / "validation.1.jsonl").read_text().splitlines()) == 3
    for text in ("a list\n", '{"a": 1}\n', "[1]\n"):  # somebody's file of this name
        curve.path.write_text(text)
        curve.begin(0)
        kept = [path.read_text() for path in tmp_path.glob("validation.*.jsonl")]
        assert not curve.path.exists() and text in kept
    line = json.loads((tmp_path / "validation.1.jsonl").read_text().splitlines()[0])
    assert line["accuracy_pct"] == {"val": 50.0} and line["rows"]["val"] == {"right": [1], "wrong": [0]}
