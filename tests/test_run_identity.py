"""OUT/run.json: the same run goes on, another is refused with what differs, a log may lie there."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from open_r1 import run_identity
from open_r1.complete import newest_complete
from open_r1.data import load_rows
from open_r1.grpo import reward_funcs_registry
from open_r1.rewards import resolve_rewards
from tests.test_distributed import make_rows
from tests.test_grpo import flags, folder, parse, run  # noqa: F401 (folder is a fixture)
from tests.tiny import save_public_form


@pytest.fixture(scope="module")
def begun(folder, tmp_path_factory) -> Path:  # noqa: F811
    """The OUT of a run with a checkpoint at update 2."""
    out = tmp_path_factory.mktemp("begun") / "out"
    out.mkdir()
    (out / "train.log").write_text("what the shell wrote\n")  # `... | tee OUT/train.log`
    make_rows(4, 3).save_to_disk(out.parent / "other_val")
    make_rows(4, 16).save_to_disk(out.parent / "other_train")
    save_public_form(out.parent / "other_base", seed=3)
    run(folder, out, "--max_steps", 2, "--save_steps", 2, "--val_dataset", folder / "val")
    return out


def judged(folder: Path, out: Path, *more):  # noqa: F811
    """What a start of the run in `begun` says, with other flags: OUT/run.json to be, and lines."""
    given = flags(folder, out, "--max_steps", 2, "--save_steps", 2, "--val_dataset", folder / "val", *more)
    recipe, args, model = parse(*given)
    data, val = load_rows(recipe.dataset_name), load_rows(recipe.val_dataset)
    rewards = resolve_rewards(recipe.reward_funcs, args.reward_weights, reward_funcs_registry)
    base, rows = Path(model.model_name_or_path), list(range(len(data)))
    now = run_identity.describe(recipe, args, model, base, rewards, data, rows, {"val": val})
    return run_identity.judge(out, now, newest_complete(out), recipe.accept_changes)


def test_the_folder_says_which_run_it_is_of(folder, begun):  # noqa: F811
    identity = json.loads((begun / "run.json").read_text())
    assert identity["flags"]["learning_rate"] == 1e-3 and "logging_steps" not in identity["flags"]
    assert identity["data"]["train"]["rows"] == 20 and identity["versions"]["torch"]
    assert newest_complete(begun)[1]["run"] == identity["run"]
    assert judged(folder, begun) == (identity, [f"goes on from {begun}/checkpoint-2"])


HARMLESS = [
    ("--logging_steps", 5), ("--max_steps", 40), ("--save_steps", 20), ("--dataloader_num_workers", 1),
    ("--max_hours", 3), ("--report_to", "tensorboard"), ("--per_device_eval_batch_size", 2),
]  # fmt: skip


@pytest.mark.parametrize("more", HARMLESS)
def test_what_does_not_decide_the_result_may_change(folder, begun, more):  # noqa: F811
    assert judged(folder, begun, *more)[1] == [f"goes on from {begun}/checkpoint-2"]


def test_the_same_updates_may_be_cut_into_other_rows(folder, begun):  # noqa: F811
    rows = ("--prompts_per_row", 2, "--gradient_accumulation_steps", 1)
    assert judged(folder, begun, *rows)[1][1:] == ["not as before: --prompts_per_row 1 -> 2"]
    with pytest.raises(ValueError, match="--gradient_accumulation_steps 2 -> 4"):
        judged(folder, begun, *rows[:2], "--gradient_accumulation_steps", 4)


CHANGES = {
    "--learning_rate 0.001 -> 0.002": ("--learning_rate", 2e-3),
    "--num_generations 4 -> 8": ("--num_generations", 8),
    "--seed 42 -> 7": ("--seed", 7),
    "--reward_weights 1.0 0.0 -> 1.0 1.0": ("--reward_weights", 1, 1),
    "--prompt_mix 0.2 -> 0.5": ("--prompt_mix", 0.5),
    "--lr_scheduler_type constant -> cosine": ("--lr_scheduler_type", "cosine"),
    "val rows: FOLDER/val -> OTHER/other_val": ("--val_dataset", "OTHER/other_val"),
    "train rows: 20 -> 16, FOLDER/train -> OTHER/other_train": ("--dataset_name", "OTHER/other_train"),
    "the model's weights: FOLDER/base -> OTHER/other_base": ("--model_name_or_path", "OTHER/other_base"),
}


def test_another_run_is_refused_with_what_differs(folder, begun):  # noqa: F811
    def filled(text) -> str:
        return str(text).replace("OTHER", str(begun.parent)).replace("FOLDER", str(folder))

    for line, more in CHANGES.items():
        with pytest.raises(ValueError) as refusal:
            judged(folder, begun, *map(filled, more))
        shown = [part.strip() for part in str(refusal.value).splitlines()]
        assert filled(line) in shown, (line, shown)
        changed = [part for part in shown if " -> " in part]
        assert len(changed) == 1, changed
        assert f"set another OUT, or --accept_changes true to go on from {begun}/checkpoint-2" in shown[-1]
        _, lines = judged(folder, begun, *map(filled, more), "--accept_changes", "true")
        assert lines == [f"goes on from {begun}/checkpoint-2", *changed]


@pytest.mark.parametrize(
    "name, before, more",
    [
        ("use_peft", False, ("--use_peft", "true")),
        ("freeze_vision_tower", False, ("--freeze_vision_tower", "true")),
        ("optim", "sgd", ()), (run_identity.STAGE, 3, ()),
    ],
)  # fmt: skip
def test_a_checkpoint_of_other_tensors_is_not_gone_on_from(folder, begun, tmp_path, name, before, more):  # noqa: F811
    """Whatever is accepted: it holds no such weights, or no such optimizer."""
    out = tmp_path / "out"
    shutil.copytree(begun, out)
    identity = json.loads((out / "run.json").read_text())
    identity["flags"][name] = before
    (out / "run.json").write_text(json.dumps(identity))
    message = rf"--{name} {before} -> [\w ]+\n(.*\n)*checkpoint-2 holds other tensors"
    with pytest.raises(ValueError, match=message):
        judged(folder, out, *more, "--accept_changes", "true")


def test_another_reward_of_the_same_name_is_told_by_its_code(folder, begun, monkeypatch):  # noqa: F811
    def accuracy(completions, **kwargs):
        """The gold answer, read otherwise."""
        ends = [f"<answer> {count} </answer>" for count in kwargs["answer"]]
        return [float(c[0]["content"].endswith(end)) for c, end in zip(completions, ends, strict=True)]

    monkeypatch.setitem(reward_funcs_registry, "accuracy", accuracy)
    with pytest.raises(ValueError, match="the code of accuracy has changed"):
        judged(folder, begun)


def test_accepted_changes_are_written_down_and_trained_with(folder, begun, tmp_path):  # noqa: F811
    out = shutil.copytree(begun, tmp_path / "out")
    run(folder, out, "--max_steps", 3, "--save_steps", 1, "--learning_rate", 0, "--accept_changes", "true",
        "--val_dataset", folder / "val")  # fmt: skip
    identity = json.loads((out / "run.json").read_text())
    assert identity["run"] == json.loads((begun / "run.json").read_text())["run"]
    assert identity["changes"] == [{"step": 2, "changed": ["--learning_rate 0.001 -> 0.0"]}]
    a, b = (folder_ / "model.safetensors" for folder_ in (out / "checkpoint-2", out / "checkpoint-3"))
    assert a.read_bytes() == b.read_bytes()


def test_another_runs_logs_are_refused_without_a_checkpoint_too(folder, begun, tmp_path):  # noqa: F811
    out = shutil.copytree(begun, tmp_path / "out")
    shutil.rmtree(out / "checkpoint-2")
    ways = "--learning_rate 0.001 -> 1.0\nset another OUT, or --accept_changes true to begin anew in this one"
    with pytest.raises(ValueError, match=ways) as refusal:
        judged(folder, out, "--learning_rate", 1)
    assert f"{out} is of another run, which left logs.jsonl and no checkpoint" in str(refusal.value)
    same, lines = judged(folder, out, "--max_steps", 40)  # stopped early, and begun again
    assert same["run"] == json.loads((begun / "run.json").read_text())["run"] and "anew" in lines[0]
    run(folder, out, "--max_steps", 1, "--save_strategy", "no", "--learning_rate", 1,
        "--val_dataset", folder / "val", "--accept_changes", "true")  # fmt: skip
    old, new = (json.loads((root / "run.json").read_text()) for root in (begun, out))
    assert old["run"] != new["run"]
    assert (out / "logs.1.jsonl").read_bytes() == (begun / "logs.jsonl").read_bytes()
    for log in out.glob("logs*"):  # before its first update a run leaves nothing to mix with
        log.unlink()
    assert "a new run" in judged(folder, out, "--learning_rate", 2)[1][0]


@pytest.mark.parametrize("name", ["checkpoint-7/optimizer.pt", "config.json", "selection.json"])
def test_a_strangers_folder_is_refused(folder, tmp_path, name):  # noqa: F811
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    with pytest.raises(ValueError, match=f"holds {name.partition('/')[0]} and no run.json"):
        run(folder, tmp_path / "out", "--dry_run", "true", "--max_steps", 2)
    assert path.read_text() == "{}"
    (tmp_path / "out/run.json").write_text("{}")
    with pytest.raises(ValueError, match="out/run.json describes no run of this trainer; set another OUT"):
        run(folder, tmp_path / "out", "--dry_run", "true", "--max_steps", 2)


def test_two_processes_do_not_write_into_one_folder(folder, tmp_path, capsys):  # noqa: F811
    """Neither into one OUT nor into one SUBMISSION."""
    code = (
        "import sys; from pathlib import Path; from open_r1.lock import lock\n"
        "for path in sys.argv[1:]: lock(Path(path), '')\n"
        "print('locked', flush=True); sys.stdin.read()"
    )
    out, submission = tmp_path / "out", tmp_path / "best"
    out.mkdir()
    command = [sys.executable, "-c", code, out / ".lock", tmp_path / ".best.lock"]
    more = ("--val_dataset", folder / "val", "--eval_strategy", "steps", "--submission_dir", submission)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(ValueError, match=f"another process is training in {out}"):
            run(folder, out, "--max_steps", 1, *more)
        with pytest.raises(ValueError, match=f"another process trains into {submission}"):
            run(folder, tmp_path / "other", "--max_steps", 1, *more)
        other.kill()  # a lock goes with its process
    assert "\nready" not in capsys.readouterr().out
    assert run(folder, out, "--max_steps", 1, *more).state.global_step == 1


def test_a_changed_world_size_says_how_to_go_on_and_that_works(folder, begun, tmp_path):  # noqa: F811
    """From the weights alone: MODEL=(the submission) SUBMISSION=(another) OUT=(another)."""
    first, submission = tmp_path / "first", tmp_path / "submission"
    more = ("--max_steps", 1, "--save_steps", 1, "--val_dataset", folder / "val", "--eval_strategy", "steps")
    run(folder, first, *more, "--submission_dir", submission)
    marker = first / "checkpoint-1/COMPLETE"
    marker.write_text(marker.read_text().replace('"world_size": 1', '"world_size": 2'))
    with pytest.raises(ValueError, match=r"MODEL=\(the submission\) SUBMISSION=\(another"):
        run(folder, first, *more, "--submission_dir", submission)
    trainer = run(
        folder, tmp_path / "second", *more, "--model_name_or_path", submission,
        "--submission_dir", tmp_path / "second_submission",
    )  # fmt: skip
    assert trainer.state.global_step == 1 and (tmp_path / "second_submission/config.json").exists()


def test_more_updates_are_another_run_where_the_schedule_is_planned_to_their_end(folder):  # noqa: F811
    for kind, counts in (("cosine", True), ("constant_with_warmup", False)):
        recipe, args, model = parse(*flags(folder, "out", "--lr_scheduler_type", kind, "--max_steps", 5))
        assert ("max_steps" in run_identity.defining_flags(recipe, args, model)) is counts
