"""Rounds on a tiny model: the gate, float32 weights of the best, a round that starts from the submission."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from open_r1 import grpo
from open_r1.checkpoint import load_policy
from open_r1.grpo import what_stands
from open_r1.install import read_record
from open_r1.submission import ensure_submission, note_score
from open_r1.validation import Example, summarize
from open_r1.weights import master_weights
from tests.test_grpo import flags, folder, lines, parse, run  # noqa: F401 (folder is a fixture)
from tests.test_submission import contents
from tests.tiny import save_public_form

ROWS = 100
EVAL = ("--eval_strategy", "steps", "--eval_steps", 1, "--save_strategy", "no")


def grade(trainer: grpo.Qwen2VLGRPOTrainer) -> dict[str, dict]:
    """In place of what the rollout copy says: how far its weights are from the base's. A little is good, far
    away is ruin; the base has 40 of 100 rows right."""
    base = dict(load_policy(trainer.keep_best.base, torch.float32).named_parameters())
    far = max(float((p - base[n]).abs().max()) for n, p in trainer.engine.model.named_parameters())
    right = 40 if far == 0 else 60 if far < 1 else 10
    examples = [Example(row, "", 1, int(row < right), row < right, False, 1, "") for row in range(ROWS)]
    rows = {example.row: example.correct for example in examples}
    return {"val": summarize(examples) | {"rows": rows}}


@pytest.fixture(autouse=True)
def graded(monkeypatch):
    """Measures by `grade`; the weights that were measured."""
    held = []

    def validate(trainer):
        held.append({name: p.clone() for name, p in trainer.engine.model.named_parameters()})
        return grade(trainer)

    monkeypatch.setattr(grpo.Qwen2VLGRPOTrainer, "validate", validate)
    return held


def a_round(folder: Path, out: Path, submission: Path, *more):  # noqa: F811
    where = ("--val_dataset", folder / "val", "--submission_dir", submission)
    return run(folder, out, *where, *EVAL, "--max_steps", 1, "--select_level", 0.9, *more)


def holds(weights: dict[str, torch.Tensor], source: Path) -> bool:
    loaded = load_policy(source, torch.float32).named_parameters()
    return all(torch.equal(weights[name], parameter) for name, parameter in loaded)


def test_a_sabotaged_second_round_changes_nothing(folder, tmp_path, graded):  # noqa: F811
    """Its learning rate is absurd. It starts from what stands there, and is measured against the base."""
    submission = tmp_path / "submission"
    a_round(folder, tmp_path / "one", submission)
    assert read_record(submission)["score"] == 60.0
    note_score(submission, score=60.0, score_to_beat=50.0)  # as finalize.py of the first round writes it
    first = contents(submission)
    graded.clear()
    more = ("--init_from", "submission", "--learning_rate", 1000, "--keep_top", 1)
    second = a_round(folder, tmp_path / "two", submission, *more)
    assert contents(submission) == first
    assert second.keep_best.best_score == 60.0 and second.keep_best.baseline == 60.0
    assert read_record(submission)["score_to_beat"] == 60.0  # also once the round is started again
    base, stands, ruined = graded
    assert holds(base, folder / "base") and holds(stands, submission) and not holds(ruined, submission)
    # The policy started from the submission: the copy of it, since the submission may change.
    assert contents(tmp_path / "two/init").items() >= first.items()
    scores = [(line["name"], line["score"]) for line in lines(tmp_path / "two/validation.jsonl")]
    assert scores == [("base", 40.0), ("submission", 60.0), ("update 1", 10.0)]
    plan = json.loads((tmp_path / "two/selection.json").read_text())
    assert plan["base"] == str(folder / "base") and plan["level"] == 0.9


def test_the_policy_and_the_rollouts_start_from_the_submission(folder, tmp_path, graded):  # noqa: F811
    """With a learning rate of 0 the weights after an update are the ones before it."""
    submission = tmp_path / "submission"
    a_round(folder, tmp_path / "one", submission)
    graded.clear()
    more = ("--init_from", "submission", "--learning_rate", 0)
    trainer = a_round(folder, tmp_path / "two", submission, *more)
    policy = {name: tensor.detach().clone() for name, tensor in master_weights(trainer.model)}
    assert holds(graded[-1], submission) and holds(policy, submission)
    (log,) = [log for log in trainer.state.log_history if "loss" in log]
    assert log["logps_gap"] < 1e-4  # the first rollout is the policy's
    # The same round once more, in its own OUT, although something else stands in the submission by now.
    for path in (submission, tmp_path / "submission.record.json"):
        path.rename(tmp_path / f"old {path.name}")
    save_public_form(submission, seed=3)
    again = a_round(folder, tmp_path / "two", submission, *more, "--max_steps", 2)
    policy = {name: tensor.detach().clone() for name, tensor in master_weights(again.model)}
    assert holds(policy, tmp_path / "old submission")
    # Named by its folder, which is gone by then: the copy is what counts.
    named = ("--init_from", tmp_path / "gone", "--learning_rate", 0)
    save_public_form(tmp_path / "gone", seed=4)
    a_round(folder, tmp_path / "three", submission, *named)
    (tmp_path / "gone").rename(tmp_path / "went")
    third = a_round(folder, tmp_path / "three", submission, *named, "--max_steps", 2)
    assert holds({name: tensor.detach() for name, tensor in master_weights(third.model)}, tmp_path / "went")
    # Another start in the same OUT is another run.
    with pytest.raises(ValueError, match=r"is of another run.*\n.*--init_from .* -> None"):
        a_round(folder, tmp_path / "two", submission, "--learning_rate", 0)


def test_a_training_that_makes_it_worse_leaves_the_base(folder, tmp_path, capsys):  # noqa: F811
    submission = tmp_path / "submission"
    a_round(folder, tmp_path / "out", submission, "--learning_rate", 1000)
    assert contents(submission) == contents(folder / "base")
    # And a model from elsewhere that scores below the base is set aside for it.
    save_public_form(tmp_path / "other", seed=1)
    other = contents(tmp_path / "other")
    a_round(folder, tmp_path / "next", tmp_path / "other", "--learning_rate", 1000)
    assert contents(tmp_path / "other") == contents(folder / "base")
    assert contents(tmp_path / "other.previous") == other
    assert "scores below the base, which takes its place" in capsys.readouterr().out


def test_a_gain_that_may_be_luck_is_not_submitted(folder, tmp_path, monkeypatch, capsys):  # noqa: F811
    """41 of 100 rows instead of 40, and other ones: the level decides."""
    usual = grade

    def by_luck(trainer):
        summaries = usual(trainer)
        if summaries["val"]["correct"] == 60:
            rows = {row: row >= 59 for row in range(ROWS)}
            summaries["val"] |= {"rows": rows, "accuracy_pct": 41.0}
        return summaries

    monkeypatch.setattr(grpo.Qwen2VLGRPOTrainer, "validate", by_luck)
    for level, step in ((0.9, 0), (0.0, 1)):
        submission = tmp_path / f"submission {level}"
        a_round(folder, tmp_path / f"out {level}", submission, "--select_level", level)
        assert read_record(submission).get("step") == step
        sure = lines(tmp_path / f"out {level}/validation.jsonl")[-1]["confidence"]
        assert 0.5 < sure < 0.7
        word = "only (--select_level 0.9): the submission stays" if level else "it is the submission"
        assert f"in {sure:.1%} of the paired bootstrap samples" in (shown := capsys.readouterr().out)
        assert word in shown


def test_the_float32_weights_of_the_best_stay(folder, tmp_path, monkeypatch):  # noqa: F811
    """Of updates with 3, 1, 2 and 2 points, with room for two: the first and the third."""
    points, held = iter((40, 43, 41, 42, 42)), {}

    def validate(trainer):
        right = next(points)
        held[trainer.state.global_step] = dict(master_weights(trainer.model))
        held[trainer.state.global_step] = {n: t.clone() for n, t in held[trainer.state.global_step].items()}
        examples = [Example(row, "", 1, 1, row < right, False, 1, "") for row in range(ROWS)]
        return {"val": summarize(examples) | {"rows": {e.row: e.correct for e in examples}}}

    monkeypatch.setattr(grpo.Qwen2VLGRPOTrainer, "validate", validate)
    masters = tmp_path / "out/masters"
    masters.mkdir(parents=True)
    (masters / "update-7.safetensors").write_bytes(b"somebody's")
    (masters / ".update-3.safetensors.tmp").write_bytes(b"of a killed run")
    a_round(folder, tmp_path / "out", tmp_path / "submission", "--max_steps", 4, "--keep_top", 2)
    names = {path.name for path in masters.iterdir()}
    assert names == {f"update-{step}.safetensors" for step in (1, 3, 7)}
    for step in (1, 3):
        stored = load_file(masters / f"update-{step}.safetensors")
        assert stored.keys() == held[step].keys()
        assert all(torch.equal(stored[name], value) for name, value in held[step].items())


def test_what_finalize_chose_is_not_beaten_by_less(folder, tmp_path):  # noqa: F811
    """It may score less on the rows of the run's own validation than the model that it was chosen over."""
    submission = tmp_path / "submission"
    a_round(folder, tmp_path / "out", submission)
    note_score(submission, score=55.0, score_to_beat=60.0)
    again = a_round(folder, tmp_path / "out", submission)
    assert again.keep_best.best_score == 60.0 and read_record(submission)["score"] == 55.0


def test_the_end_says_whether_the_base_stands(tmp_path):
    save_public_form(tmp_path / "base")
    ensure_submission(tmp_path / "base", tmp_path / "submission")
    best = SimpleNamespace(submission=tmp_path / "submission", best_score=33.5)
    trainer = SimpleNamespace(
        keep_best=best, state=SimpleNamespace(global_step=3), args=SimpleNamespace(max_steps=3)
    )
    words = "submission holds the base, as no model was surely better: score 33.50."
    assert words in what_stands(trainer, None)
    note_score(best.submission, recipe="grpo")
    assert "submission holds the best validated model: score 33.50." in what_stands(trainer, None)


def test_where_the_disk_has_no_room_none_are_kept(folder, tmp_path, monkeypatch, capsys):  # noqa: F811
    from open_r1 import disk, top_masters

    real = disk.shortage
    monkeypatch.setattr(
        top_masters.disk, "shortage",
        lambda needs, **k: "the disk is small" if "float32" in needs[0][2] else real(needs, **k),
    )  # fmt: skip
    a_round(folder, tmp_path / "out", tmp_path / "submission", "--max_steps", 2, "--keep_top", 2)
    shown = capsys.readouterr().out
    assert shown.count("the disk is small: none are kept (--keep_top) until there is room") == 1
    assert not list((tmp_path / "out").glob("masters/*"))
    assert read_record(tmp_path / "submission")["score"] == 60.0


def test_rounds_that_cannot_be(folder, tmp_path):  # noqa: F811
    with pytest.raises(ValueError, match="--init_from submission: .* holds no model yet; leave it out"):
        a_round(folder, tmp_path / "out", tmp_path / "submission", "--init_from", "submission")
    with pytest.raises(ValueError, match="without --submission_dir"):
        run(folder, tmp_path / "out", "--init_from", "submission")
    strange = tmp_path / "strange"
    save_public_form(strange)
    (strange / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="--init_from .*strange is no model like the base: .*llama"):
        a_round(folder, tmp_path / "out", tmp_path / "submission", "--init_from", strange)
    with pytest.raises(ValueError, match="--init_from /nowhere: .* exist; set the folder of a model"):
        a_round(folder, tmp_path / "out", tmp_path / "submission", "--init_from", "/nowhere")
    with pytest.raises(ValueError, match="1 thing to change\n.*--selection_rows /nowhere does not exist"):
        a_round(folder, tmp_path / "out", tmp_path / "submission", "--selection_rows", "/nowhere")
    given = flags(folder, tmp_path / "out", "--select_level", 1, "--keep_top", -1, "--wise_alphas", 0.5, 1.5)
    with pytest.raises(ValueError) as refused:
        grpo.run(*parse(*given, "--finalize_minutes", "0"))
    for word in ("--select_level 1:", "--keep_top -1:", "--wise_alphas 0.5 1.5:", "--finalize_minutes 0:"):
        assert word in str(refused.value)


def test_the_rows_that_select_are_the_ones_that_are_looked_at(folder, tmp_path, monkeypatch):  # noqa: F811
    split = {"val": {"rows": 3, "selection": [0, 2], "report": [1]}}
    (tmp_path / "rows.json").write_text(json.dumps(split))
    monkeypatch.undo()
    trainer = a_round(
        folder, tmp_path / "out", tmp_path / "submission", "--selection_rows", tmp_path / "rows.json"
    )
    assert trainer.validation_rows == {"val": [0, 2]}
    for line in lines(tmp_path / "out/validation.jsonl"):
        assert sorted(line["rows"]["val"]["right"] + line["rows"]["val"]["wrong"]) == [0, 2]
    assert json.loads((tmp_path / "out/selection.json").read_text())["rows"] == {"val": [0, 2]}
    split["val"]["rows"] = 4
    (tmp_path / "rows.json").write_text(json.dumps(split))
    with pytest.raises(ValueError, match="splits 4 rows, and .* has 3"):
        more = ("--selection_rows", tmp_path / "rows.json")
        a_round(folder, tmp_path / "next", tmp_path / "submission", *more)
    (tmp_path / "rows.json").write_text(json.dumps({"another": split["val"]}))
    with pytest.raises(ValueError, match="rows.json splits another, and not val"):
        a_round(folder, tmp_path / "next", tmp_path / "submission", *more)
