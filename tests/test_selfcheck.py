"""selfcheck.py from the outside: its numbers and files, its two engines, and every way to refuse."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import selfcheck

ROOT = Path(selfcheck.__file__).parent
REPETITION_PENALTY = 1.3  # acts under greedy decoding too


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def read_examples(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    from tests.tiny import save_public_form

    folder = tmp_path_factory.mktemp("models") / "submission"
    save_public_form(folder)
    edit_json(folder / "generation_config.json", repetition_penalty=REPETITION_PENALTY)
    return folder


def save_set(folder: Path, rows: int) -> None:
    from datasets import Dataset, Image

    from tests.tiny import noise_image

    Dataset.from_list([
        {
            "image": noise_image(i, 60 + 40 * (i % 3), 60),
            "problem": "How many items are there in the image?",
            "solution": f"<answer> {3 + i % 4} </answer>",
        }
        for i in range(rows)
    ]).cast_column("image", Image()).save_to_disk(folder)  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    save_set(folder / "val", 5)
    save_set(folder / "ood_val", 4)
    return {"val": folder / "val", "ood_val": folder / "ood_val"}


def call(monkeypatch, *arguments) -> int:
    """main() in this process: the imports of a fresh one take most of its time."""
    monkeypatch.setattr(sys, "argv", ["selfcheck.py", *map(str, arguments)])
    return selfcheck.main()


def refusal(monkeypatch, capsys, *arguments) -> str:
    assert call(monkeypatch, *arguments) == 2
    sentence = capsys.readouterr().err.strip().splitlines()[-1]
    assert sentence.startswith("selfcheck: ") and "Traceback" not in sentence
    return sentence


@pytest.fixture(scope="module")
def program(model, data, tmp_path_factory):
    """The program as a user starts it, in two processes, with the environment's paths."""
    out = tmp_path_factory.mktemp("program") / "results"
    paths = {"SUBMISSION": model, "VAL": data["val"], "OOD_VAL": data["ood_val"]}
    command = [
        sys.executable,
        ROOT / "selfcheck.py",
        "--dtype",
        "float32",
        "--out",
        out,
        "--num_processes",
        "2",
    ]
    done = subprocess.run(
        [*map(str, command), "--dataloader_num_workers", "1"],
        env=os.environ | {name: str(path) for name, path in paths.items()} | {"CUDA_VISIBLE_DEVICES": ""},
        cwd=out.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done, out


def test_the_program_writes_table_json_and_examples(program, model, data):
    done, out = program
    assert sorted(path.name for path in out.iterdir()) == ["ood_val.jsonl", "selfcheck.json", "val.jsonl"]
    report = json.loads((out / "selfcheck.json").read_text())
    assert list(report) == ["val", "ood_val", "score"]
    for name, rows in (("val", 5), ("ood_val", 4)):
        examples, summary = read_examples(out / f"{name}.jsonl"), report[name]
        assert [e["row"] for e in examples] == list(range(rows))
        assert [e["answer"] for e in examples] == [3 + i % 4 for i in range(rows)]
        assert {e["question"] for e in examples} == {"How many items are there in the image?"}
        assert summary["total"] == rows and summary["correct"] == sum(e["correct"] for e in examples)
        assert summary["accuracy_pct"] == 100 * summary["correct"] / rows
        assert summary["parsed_pct"] == 100 * sum(e["prediction"] is not None for e in examples) / rows
        assert summary["truncated_pct"] == 100 * sum(e["num_tokens"] == 256 for e in examples) / rows
        assert (summary["model"], summary["data"]) == (str(model), str(data[name]))
        assert (summary["engine"], summary["dtype"], summary["limit"]) == ("fast", "float32", None)
    assert report["score"] == (report["val"]["accuracy_pct"] + report["ood_val"]["accuracy_pct"]) / 2
    assert "Accuracy by true count" in done.stdout and "ood_val" in done.stdout
    assert "row/s" in done.stderr and "<" in done.stderr  # the bar shows the time left
    assert sorted(path.name for path in model.iterdir()) == [
        "chat_template.json", "config.json", "generation_config.json", "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors", "model.safetensors.index.json", "preprocessor_config.json",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip


def test_both_engines_and_any_number_of_processes_agree(program, model, data, tmp_path, monkeypatch):
    """Item by item: text, tokens, truncation and grade."""
    for engine, other in (("transformers", "FastEngine"), ("fast", "TransformersEngine")):
        with monkeypatch.context() as patch:
            patch.setattr(f"open_r1.rollout.{other}", None)  # not the one asked for
            assert call(
                patch, "--model", model, "--data", *data.values(), "--dtype", "float32", "--engine", engine,
                "--out", tmp_path / engine, "--batch_size", 3, "--dataloader_num_workers", 0,
            ) == 0  # fmt: skip
        for name in data:
            found = read_examples(tmp_path / engine / f"{name}.jsonl")
            assert found == read_examples(program[1] / f"{name}.jsonl")


def test_the_answers_are_those_of_the_graders_own_loop(program, model, data):
    """Written from the brief alone: processor and `generate` of the library, nothing of open_r1."""
    import torch
    from datasets import load_from_disk
    from transformers import AutoProcessor, Qwen2VLForConditionalGeneration

    policy = Qwen2VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(model)
    examples = read_examples(program[1] / "val.jsonl")
    for row, example in zip(load_from_disk(data["val"]), examples, strict=True):
        text = (
            f"{row['problem']} First output the thinking process in <think> </think> "
            "and final answer (number) in <answer> </answer> tags."
        )
        message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}
        prompt = processor.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        inputs = processor(text=[prompt], images=[row["image"]], return_tensors="pt")
        output = policy.generate(**inputs, do_sample=False, max_new_tokens=256)[
            0, inputs["input_ids"].shape[1] :
        ]
        assert processor.decode(output, skip_special_tokens=True) == example["text"]
        assert len(output) == example["num_tokens"]


def test_limit_takes_rows_evenly_spaced_and_equal_names_are_told_apart(model, data, tmp_path, monkeypatch):
    other = tmp_path / "val"
    shutil.copytree(data["ood_val"], other)
    out = tmp_path / "out"
    arguments = [
        "--model",
        model,
        "--data",
        data["val"],
        other,
        "--limit",
        2,
        "--out",
        out,
        "--dataloader_num_workers",
        0,
    ]
    assert call(monkeypatch, *arguments) == 0
    report = json.loads((out / "selfcheck.json").read_text())
    assert list(report) == ["val", "val_2", "score"] and report["val_2"]["data"] == str(other)
    assert [e["row"] for e in read_examples(out / "val.jsonl")] == [0, 2]
    assert [e["row"] for e in read_examples(out / "val_2.jsonl")] == [0, 2]
    assert report["val"]["dtype"] == "bfloat16" and report["val"]["limit"] == 2  # auto: the checkpoint's own
    assert call(monkeypatch, *arguments) == 0  # its own results may be replaced
    (out / "selfcheck.json").unlink()
    assert call(monkeypatch, *arguments) == 2  # somebody else's may not


def test_of_several_splits_the_one_is_scored_that_training_validates_on(data):
    from datasets import DatasetDict, load_from_disk

    parts = {name: load_from_disk(data[folder]) for name, folder in (("train", "val"), ("test", "ood_val"))}
    folder = data["val"].with_name("splits")
    DatasetDict(parts).save_to_disk(folder)
    loaded = {split: selfcheck.load_sets({"a": folder}, split)["a"] for split in ("test", "train")}
    assert [len(loaded[split]) for split in ("test", "train")] == [4, 5]
    assert selfcheck.parse([]).split == "test"


def test_names_of_sets():
    assert selfcheck.name_sets(["/a/val", "/b/val/", "c/val", "/d/score"]) == {
        "val": "/a/val", "val_2": "/b/val/", "val_3": "c/val", "score_2": "/d/score",
    }  # fmt: skip


def break_nothing_but_the_type(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="llama")


def lose_a_shard(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def cut_a_shard(folder: Path) -> None:
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def change_tensors(folder: Path, change) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model-00002-of-00002.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    weights = json.loads(index.read_text())["weight_map"]
    kept = {name: file for name, file in weights.items() if file != path.name} | dict.fromkeys(
        tensors, path.name
    )
    edit_json(index, weight_map=kept)


def lose_a_tensor(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.pop("model.norm.weight"))


def add_a_tensor(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update(stranger=tensors["model.norm.weight"].clone()))


def lose_the_processor(folder: Path) -> None:
    (folder / "preprocessor_config.json").unlink()


def lose_the_end(folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=None)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (break_nothing_but_the_type, "llama"),
        (lose_a_shard, "model-00002-of-00002.safetensors"),
        (cut_a_shard, "copy the model again"),
        (lose_a_tensor, "model.language_model.norm.weight"),
        (add_a_tensor, "stranger"),
        (lose_the_processor, "no processor"),
        (lose_the_end, "eos_token_id"),
    ],
)
def test_a_folder_that_is_no_whole_model_is_refused(
    model, data, tmp_path, monkeypatch, capsys, damage, words
):
    folder = tmp_path / "broken"
    shutil.copytree(model, folder)
    damage(folder)
    out = tmp_path / "out"
    sentence = refusal(monkeypatch, capsys, "--model", folder, "--data", data["val"], "--out", out)
    assert words in sentence and str(folder) in sentence or words == "eos_token_id"
    assert not out.exists()


def test_paths_and_flags_are_refused_before_anything_is_loaded(model, data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    good = ["--model", model, "--data", data["val"]]
    for arguments, words in [
        (["--model", tmp_path / "nowhere", "--data", data["val"]], "nowhere does not exist: set --model"),
        (["--model", model, "--data", data["val"], tmp_path / "gone"], "gone does not exist: set --data"),
        ([*good, "--limit", "0"], "--limit 0"),
        ([*good, "--batch_size", "0"], "--batch_size 0"),
        ([*good, "--dataloader_num_workers", "-1"], "--dataloader_num_workers -1"),
        ([*good, "--out", model], "inside the model folder"),
        ([*good, "--out", model / "results"], "inside the model folder"),
    ]:
        monkeypatch.setattr(selfcheck, "launch", None)
        assert words in refusal(monkeypatch, capsys, *arguments)
    assert not list(tmp_path.iterdir())


def test_data_that_cannot_be_used_is_refused(model, tmp_path, monkeypatch, capsys):
    from datasets import Dataset

    (tmp_path / "empty").mkdir()
    rows = Dataset.from_dict({"problem": ["How many?"], "solution": ["3"]})
    rows.filter(lambda row: False).save_to_disk(tmp_path / "none")
    shutil.copytree(tmp_path / "none", tmp_path / "damaged")
    next((tmp_path / "damaged").glob("*.arrow")).write_bytes(b"no table")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "0.png").write_bytes(b"no image")
    (broken / "val.jsonl").write_text('{"image": "0.png", "problem": "How many?", "solution": "3"}\n')
    for folder, words in [
        ("empty", "neither"),
        ("none", "has no rows"),
        ("damaged", "cannot be read"),
        ("broken", "row 0 of"),
    ]:
        arguments = ["--model", model, "--data", tmp_path / folder, "--out", tmp_path / "out"]
        assert words in refusal(monkeypatch, capsys, *arguments, "--dataloader_num_workers", 1)


@pytest.fixture
def forked(monkeypatch):
    """Several processes, forked: they start at once, and know what the test has replaced."""
    import torch.multiprocessing as mp

    monkeypatch.setattr(mp, "spawn", functools.partial(mp.start_processes, start_method="fork"))


def test_a_refusal_of_several_processes_is_one_sentence(model, data, tmp_path, monkeypatch, capfd, forked):
    folder = tmp_path / "broken"
    shutil.copytree(model, folder)
    lose_the_processor(folder)
    assert call(monkeypatch, "--model", folder, "--data", data["val"], "--num_processes", 2) == 2
    (sentence,) = capfd.readouterr().err.splitlines()
    assert sentence.startswith(f"selfcheck: {folder} has no processor")


def test_a_process_that_dies_ends_the_program_at_once(model, data, monkeypatch, forked):
    def one_dies(rank: int, *arguments) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)  # as a process that waits for the other one would

    monkeypatch.setattr(selfcheck, "work", one_dies)
    started = time.monotonic()
    with pytest.raises(SystemExit, match="process 1 terminated with signal SIGKILL"):
        call(monkeypatch, "--model", model, "--data", data["val"], "--num_processes", 2)
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("has_venv", [True, False])
def test_a_python_without_the_packages(has_venv, tmp_path):
    """It goes on with .venv's, and where there is none, says how to make it."""
    for file in ("selfcheck.py", "open_r1/__init__.py", "open_r1/network.py", "open_r1/versions.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / "requirements.txt").write_text("a-package-that-nobody-has>=1\n")
    if has_venv:
        python = tmp_path / ".venv/bin/python"
        python.parent.mkdir(parents=True)
        python.write_text('#!/bin/sh\necho "own python: $@"\n')
        python.chmod(0o755)
    command = [sys.executable, tmp_path / "selfcheck.py", "--data", "a folder"]
    done = subprocess.run(command, capture_output=True, text=True)
    if has_venv:
        assert done.stdout == f"own python: {tmp_path}/selfcheck.py --data a folder\n"
    else:
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
        assert "a-package-that-nobody-has" in done.stderr and "bash test.sh" in done.stderr
