"""The preflight: each check fails for what it looks for, and all faults come together."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from open_r1 import data_survey, grpo, machine_checks, machines, model_checks, preflight, status, versions
from open_r1.arguments import GRPOArguments
from open_r1.data import PromptEncoder, load_rows
from open_r1.grpo import reward_funcs_registry
from tests.data_sets import encoded, table
from tests.test_grpo import ROOT, flags, folder, parse, run  # noqa: F401 (folder is a fixture)
from tests.tiny import PAD, noise_image, save_public_form, tiny_config, tiny_processor

TINY_PARAMETERS = 319_360  # of the tests' model
LETTERS = "def letters(completions, **kwargs): return [len(c[0]['content']) for c in completions]\n"
FIRST, SECOND = (f"model-{number:05}-of-00002.safetensors" for number in (1, 2))


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("preflight") / "base"
    save_public_form(base)
    return base


@pytest.fixture
def base(original, tmp_path) -> Path:
    """A model to break."""
    return shutil.copytree(original, tmp_path / "base")


def change(file: Path, **values) -> None:
    """Sets keys of a JSON file; None removes one."""
    content = json.loads(file.read_text()) | values
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def faults_of(base: Path, *flags) -> str:
    """What the checks of the model say, each on a line."""
    _, args, _ = parse("--output_dir", base.parent / "out", "--use_cpu", "true", *flags)
    config = model_checks.check_config(base)
    found = [model_checks.check_weights(base, config)[1]]
    found += [model_checks.check_generation(base, config, args)[1]]
    processor = preflight.load_processor(base, None, None)
    found += [model_checks.check_processor(base, processor, config)[1]]
    found += [model_checks.check_template(base, processor)[1]]
    return "\n".join(fault for faults in found for fault in faults)


def test_a_whole_model_has_no_fault(base):
    assert faults_of(base) == ""


# --- the model's folder -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values, sentence",
    [
        ({"model_type": "qwen2_5_vl"}, "is a 'qwen2_5_vl' model; set MODEL to a 'qwen2_vl' one"),
        ({"quantization_config": {"bits": 4}}, "is quantized"),
    ],
)
def test_another_kind_of_model(base, values, sentence):
    change(base / "config.json", **values)
    with pytest.raises(ValueError, match=sentence):
        model_checks.check_config(base)


@pytest.mark.parametrize(
    "values, reason",
    [
        ({"hidden_size": "64"}, "Validation error for field 'hidden_size'"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"vocab_size": -1}, "RuntimeError"),
        ({"rope_theta": {}}, "TypeError"),
        ({"rope_scaling": {"type": "weird", "mrope_section": [2, 3, 3]}}, "KeyError: 'weird'"),
        ({"rope_theta": 0}, "rope_theta 0 is not above 0"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3]}}, r"\[2, 3\] is not three parts"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 9]}}, r"\[2, 3, 9\] is not three"),
    ],
)
def test_a_configuration_of_which_no_model_can_be_made(base, values, reason):
    change(base / "config.json", **values)
    with pytest.raises(ValueError, match=f"no model can be made of .*config.json \\(.*{reason}"):
        model_checks.check_config(base)


@pytest.mark.parametrize(
    "values, reason",
    [
        ({"eos_token_id": ["<|im_end|>"]}, "eos_token_id ['<|im_end|>'] is none of 320 tokens"),
        ({"eos_token_id": 1e9}, "eos_token_id 1000000000.0 is none of 320 tokens"),
        ({"eos_token_id": 320}, "eos_token_id 320 is none of 320 tokens"),
        ({"top_p": []}, "top_p [] is no number"),
        ({"repetition_penalty": "1.05"}, "repetition_penalty '1.05' is no number"),
        ({"num_beams": "2"}, "num_beams '2' is no number"),
        ({"pad_token_id": []}, "TypeError"),
    ],
)
def test_generation_settings_of_another_kind(base, values, reason):
    change(base / "generation_config.json", **values)
    assert f"generation_config.json cannot be used ({reason}" in faults_of(base)


def test_an_adapter_and_a_folder_without_config(base):
    (base / "config.json").unlink()
    with pytest.raises(ValueError, match="has no readable config.json"):
        model_checks.check_config(base)
    (base / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="is a LoRA adapter; merge it"):
        model_checks.check_config(base)


def test_weights_cut_short_missing_left_over_and_of_another_shape(base):
    shard = base / SECOND
    whole, tensors = shard.read_bytes(), load_file(shard)
    shard.write_bytes(whole[:-100])
    assert f"{SECOND} has {len(whole) - 100:,} bytes and its header says {len(whole):,}" in faults_of(base)
    shard.unlink()
    assert f"{SECOND} has no readable header (FileNotFoundError)" in faults_of(base)
    shard.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert f"{SECOND} has no readable header" in faults_of(base)
    save_file({"stranger": tensors.pop("model.norm.weight")}, shard)
    found = faults_of(base)
    assert "1 tensors are none of its config.json, first stranger" in found
    assert f"{len(tensors) + 1} tensors are missing, first model.language_model.layers.1.mlp" in found
    save_file(tensors | {"model.norm.weight": torch.ones(3)}, shard)
    assert "1 tensors have another shape than its config.json says, first model.language_model.norm" in (
        faults_of(base)
    )


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_value_that_is_not_finite(base, value):
    tensors = load_file(base / SECOND)
    tensors["model.norm.weight"][3] = value
    save_file(tensors, base / SECOND)
    assert f"{base} holds values that are not finite, first in model.language_model.norm" in faults_of(base)


def test_names_that_are_too_long_are_sentences(folder, tmp_path):  # noqa: F811
    name = "n" * 300
    with pytest.raises(preflight.NotReady) as refusal:
        run(folder, tmp_path / name, "--model_name_or_path", f"/{name}", "--dataset_name", f"/{name}/{name}",
            "--submission_dir", tmp_path / name, "--val_dataset", folder / "val", "--eval_strategy", "steps",
            "--dry_run", "true", "--max_steps", 1)  # fmt: skip
    shown = str(refusal.value)
    assert "Errno" not in shown and f"The model folder /{name} does not exist" in shown
    assert f"there is no data at /{name}" in shown
    for flag in ("output_dir", "submission_dir"):
        assert f"--{flag} with a name of 300 bytes (nnnnnnnnnnnnnnnnnnnn…): set 230 at most" in shown


def test_a_head_that_is_not_the_embedding(base):
    """A tied config with a head in the file: fine when it is the embedding, else lost in silence."""
    embedding = load_file(base / FIRST)["model.embed_tokens.weight"]
    for head, fits in ((embedding.clone(), True), (embedding * 2, False)):
        save_file(load_file(base / SECOND) | {"lm_head.weight": head}, base / SECOND)
        assert ("lm_head.weight is not the embedding that config.json ties it to" in faults_of(base)) != fits
    change(base / "config.json", tie_word_embeddings=False)
    assert faults_of(base) == ""
    shutil.copy(base / SECOND, base / "kept")
    save_file({k: v for k, v in load_file(base / "kept").items() if k != "lm_head.weight"}, base / SECOND)
    assert "1 tensors are missing, first lm_head.weight" in faults_of(base)


# --- its processor, generation settings and template --------------------------------------------------------


def test_a_processor_that_is_missing_or_of_another_model(base):
    change(base / "preprocessor_config.json", merge_size=4)
    assert "the merge size is 4 for the processor and 2 for the model" in faults_of(base)
    change(base / "preprocessor_config.json", merge_size=2)
    vision = json.loads((base / "config.json").read_text())
    change(base / "config.json", image_token_id=7, vocab_size=200, vision_config=vision["vision_config"])
    processor = preflight.load_processor(base, None, None)
    config = model_checks.check_config(base)
    _, faults = model_checks.check_processor(base, processor, config)
    assert "the image token is 262 for the processor and 7 for the model" in faults[0]
    assert "the tokenizer has 264 tokens and the model 200" in faults[1]
    (base / "preprocessor_config.json").unlink()
    with pytest.raises(ValueError, match="has no processor that loads"):
        preflight.load_processor(base, None, None)


@pytest.mark.parametrize(
    "file, values, sentence",
    [
        ("preprocessor_config.json", {"min_pixels": "3136"}, "a processor that fails .TypeError"),
        ("preprocessor_config.json", {"patch_size": 0}, "a processor that fails .ZeroDivisionError"),
        ("preprocessor_config.json", {"image_mean": [0.5, 0.5]}, "a processor that fails .RuntimeError"),
        ("preprocessor_config.json", {"image_std": 0}, "a processor that makes pixels which are not finite"),
        ("tokenizer_config.json", {"model_max_length": "32768"}, "a processor that fails .TypeError"),
    ],
)
def test_a_processor_with_values_of_another_kind(base, file, values, sentence):
    change(base / file, **values)
    with pytest.raises(ValueError, match=f"{sentence}.*: copy tokenizer, processor and chat template"):
        preflight.load_processor(base, None, None)


def test_generation_settings(base):
    file = base / "generation_config.json"
    change(file, eos_token_id=None)
    assert "names no eos_token_id: completions would never end" in faults_of(base)
    change(file, eos_token_id=[PAD], no_repeat_ngram_size=3, repetition_penalty=1.05)
    assert "sets {'no_repeat_ngram_size': 3}, which the fast engine does not implement" in faults_of(base)
    assert faults_of(base, "--rollout_engine", "transformers") == ""
    config = model_checks.check_config(base)
    lines, _ = model_checks.check_generation(base, config, parse("--output_dir", "o", "--use_cpu", "true")[1])
    assert lines == [
        "rollouts: --temperature 1 --top_p 1 --top_k 0; validation and grader: greedy",
        "not used: the model's own temperature 0.01, top_k 1, top_p 0.001 (greedy: no learning)",
        "its repetition_penalty 1.05 acts in validation and the grader, not in rollouts",
    ]


@pytest.mark.parametrize(
    "old, new, sentence",
    [
        ("<|image_pad|>", "", "writes 0 image tokens for one image"),
        ("{{ part['text'] }}", "{{ part['text'] | upper }}", "does not write the question as it is"),
        ("{% if add_generation_prompt %}", "{% if false %}", "does not open the answer's turn"),
        ("{% endfor %}", "", "no chat template that renders the grader's prompt"),
    ],
)
def test_a_template_that_does_not_fit(base, old, new, sentence):
    file = base / "chat_template.json"
    template = json.loads(file.read_text())["chat_template"]
    assert old in template
    change(file, chat_template=template.replace(old, new))
    assert sentence in faults_of(base)


def test_no_template(base):
    (base / "chat_template.json").unlink()
    assert "no chat template that renders the grader's prompt" in faults_of(base)


# --- data and rewards ---------------------------------------------------------------------------------------


def test_the_facts_are_those_of_the_encoded_prompts(tmp_path):
    """Token counts come from headers and texts alone, and are exactly what the encoder makes."""
    sizes = [(60, 40), (500, 30), (31, 400), (1000, 700), (64, 64)]
    pictures = [encoded(noise_image(n, *size)) for n, size in enumerate(sizes)]
    rows = table(pictures, [f"How many{' red' * n}?" for n in range(5)], [1, 7, 2, 12, 30])
    rows.save_to_disk(tmp_path / "d")
    data, processor = load_rows(tmp_path / "d"), tiny_processor()
    order = [4, 1, 2, 3, 0]
    facts = data_survey.row_facts(data, processor, order, num_workers=0)
    encoder = PromptEncoder(processor, tiny_config(), prompt_mix=0, keep_images=False, seed=0)
    assert [fact.tokens for fact in facts] == [len(encoder.encode(data, n).input_ids) for n in order]
    assert data_survey.check_answers(facts) == (["1:20% 2:20% 7:20% 11+:40%, above six 60% of the rows"], [])
    lines, _ = data_survey.check_images(data, processor, facts)
    assert lines == ["1 a row, 60 x 40 to 1000 x 700 pixels, 4 to 900 tokens each"]
    lines, faults = data_survey.check_prompts(data, order, facts, 1200, 256)
    assert "1 rows exceed the model's 1,200" in lines[0] and "1 prompts of" in faults[0]
    assert "(first row 3) and 256 new tokens exceed the model's 1,200: set --max_pixels lower" in faults[0]
    assert data_survey.check_prompts(data, order, facts, 4096, 256)[1] == []


def test_less_than_an_epoch(folder, tmp_path, capsys):  # noqa: F811
    table(solutions=[1, 2, 8, 4]).save_to_disk(tmp_path / "train")
    asked = ("--dataset_name", tmp_path / "train", "--num_train_epochs", 0.1, "--dry_run", "true")
    run(folder, tmp_path / "out", *asked)
    shown = capsys.readouterr().out
    assert "1 update, 1 a rollout: 0.50 epochs" in shown  # a tenth of four rows is none
    assert "answers      1:25% 2:25% 4:25% 8:25%, above six 25% of the rows" in shown


def test_rows_without_images_answers_or_columns(folder, tmp_path):  # noqa: F811
    table([None] * 4).save_to_disk(tmp_path / "blind")
    table(solutions=["many", "3", "", "five"]).save_to_disk(tmp_path / "unanswered")
    table().remove_columns("problem").save_to_disk(tmp_path / "unasked")
    for name, sentence in (
        ("blind", "blind has no images: name their column image or images"),
        ("unanswered", "3 of the 4 rows .* cannot be used:\n .*row 0: solution 'many' is not a count"),
        ("unasked", "has no column problem or question; it has solution"),
    ):
        with pytest.raises(preflight.NotReady, match=sentence):
            run(folder, tmp_path / "out", "--dataset_name", tmp_path / name, "--max_steps", 1)


def test_a_reward_that_fails_on_gold(folder, tmp_path, monkeypatch, capsys):  # noqa: F811
    def broken(completions, answer, **kwargs):
        return [float(c[0]["content"]) - a for c, a in zip(completions, answer, strict=True)]

    monkeypatch.setitem(reward_funcs_registry, "broken", broken)
    with pytest.raises(preflight.NotReady, match="reward broken raised ValueError.*tried on gold answers"):
        run(
            folder, tmp_path / "out", "--max_steps", 1, "--reward_funcs", "accuracy", "broken",
            "--reward_weights", 1, 1,
        )  # fmt: skip
    shown = capsys.readouterr().out
    assert re.search(r"broken +1 +failed +failed\n +-> 1, 2 below\n", shown)


# --- the machine --------------------------------------------------------------------------------------------


def test_packages_that_were_never_tested(monkeypatch):
    real, others = versions.installed, {"trl": "0.14.0", "peft": None}
    monkeypatch.setattr(versions, "installed", lambda name: others[name] if name in others else real(name))
    lines, faults = machine_checks.check_packages()
    assert "trl 0.14.0" in lines[0]
    assert re.search(r"trl>=.* \(here: 0.14.0\) was never tested; install from", faults[0])
    assert re.search(r"peft>=.* \(here: none\) is needed", faults[1])


GPU = machine_checks.Device("Card", free=40 * 2**30, total=48 * 2**30)


def gpu_args(processes: int, **values) -> SimpleNamespace:
    common = {"device": torch.device("cuda"), "use_cpu": False, "n_gpu": 1, "bf16": True, "beta": 0.0}
    common |= {"processes": processes, "world_size": processes, "optim": "adamw_torch_fused"}
    return SimpleNamespace(**common | values)


def test_gpus_that_are_not_there_or_not_used(monkeypatch):
    lines, faults = machine_checks.check_devices([GPU, GPU], gpu_args(2))
    assert lines == ["2 x Card: 40.0, 40.0 of 48.0 GiB free"] and not faults
    alone = gpu_args(1, n_gpu=2)
    assert "2 GPUs are visible to a single process" in machine_checks.check_devices([GPU], alone)[1][0]
    none = gpu_args(1, device=torch.device("cpu"))
    assert "no GPU is visible" in machine_checks.check_devices([GPU], none)[1][0]


def test_a_dry_run_counts_on_what_train_sh_would_launch(folder, tmp_path, monkeypatch, capsys):  # noqa: F811
    """One process, which sees two GPUs."""
    parsed = parse(*flags(folder, tmp_path / "out", "--max_steps", 1, "--dry_run", "true"))
    monkeypatch.setattr(GRPOArguments, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(machine_checks, "_gpu", lambda index: GPU)
    grpo.run(*parsed)
    shown = capsys.readouterr().out
    assert "2 x Card: 40.0, 40.0 of 48.0 GiB free" in shown and "expected on each GPU" in shown
    assert "4 prompts (2 processes x 2 rows x 1) x 4 completions" in shown


def test_a_full_disk_and_one_that_cannot_be_written(folder, tmp_path, monkeypatch):  # noqa: F811
    more = ("--max_steps", 4, "--save_steps", 2, "--val_dataset", folder / "val", "--eval_strategy", "steps")
    more = (*more, "--submission_dir", tmp_path / "submission", "--dry_run", "true")
    usage = shutil.disk_usage(tmp_path)
    size = sum(file.stat().st_size for file in (folder / "base").glob("*.safetensors"))
    need = 2 * size + 2 * 12 * TINY_PARAMETERS  # two submissions, two checkpoints
    for free, fits in ((need * 1.05, True), (need, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=int(free)))
        with contextlib.nullcontext() if fits else pytest.raises(preflight.NotReady) as refusal:
            run(folder, tmp_path / "out", *more)
    assert re.search(
        r"1\. the disk of .* free and needs .* GB for 2 checkpoints and .* GB for 2 submissions; make room",
        str(refusal.value),
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(preflight.NotReady, match=f"1. {tmp_path} cannot be written: set OUT and SUBMISSION"):
        run(folder, tmp_path / "out2", *more)


def test_a_place_where_no_submission_may_stand(folder, base, tmp_path, capsys):  # noqa: F811
    more = ("--max_steps", 1, "--val_dataset", folder / "val", "--eval_strategy", "steps", "--dry_run", True)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/todo.txt").write_text("mine")
    change(base / "config.json", model_type="llama")
    for place, sentence in (
        (folder / "base", "would overwrite the base model"),
        (tmp_path / "notes/todo.txt", "is not a folder"),
        (tmp_path / "notes", "holds something that is no valid model like the base"),
        (base, "is a 'llama' model"),
    ):
        refused = f"1 thing to change\n  1. SUBMISSION {place} .*{sentence}"
        with pytest.raises(preflight.NotReady, match=refused):
            run(folder, tmp_path / "out", *more, "--submission_dir", place)
    change(base / "config.json", model_type="qwen2_vl")
    run(folder, tmp_path / "out", *more, "--submission_dir", base)
    assert f"{base} holds a model, which is measured first" in " ".join(capsys.readouterr().out.split())


# --- several ranks


def test_a_fault_of_another_rank_is_in_the_one_list(folder, tmp_path):  # noqa: F811
    """Rank 1 alone cannot import the reward. Both ranks end, rank 0 speaks, and nobody waits."""
    (tmp_path / "fickle.py").write_text("import os\nif os.environ['RANK'] == '0':\n    " + LETTERS)
    command = [
        sys.executable, ROOT / "scripts/launch.py", "--multi_gpu", "--num_machines", "1",
        "--num_processes", "2", "--main_process_port", "0", "--mixed_precision", "no",
        "--dynamo_backend", "no",
        ROOT / "open_r1/grpo.py", *flags(folder, tmp_path / "out", "--max_steps", 1, "--num_generations", 1),
        "--reward_funcs", "fickle.letters", "--reward_weights", "1",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and done.stdout.count("packages ") == 1
    said = done.stderr[done.stderr.index("grpo.py: not ready") :]
    assert said.startswith("grpo.py: not ready: 2 things to change\n  1. --num_generations 1")
    assert "\n  2. rank 1: --reward_funcs fickle.letters could not be imported" in said
    assert said.count("grpo.py: ") == 1 and "Traceback" not in said
    assert re.fullmatch("launch.py: process [01] ended first, with exit code 1", said.splitlines()[-1])


# --- the screen ---------------------------------------------------------------------------------------------


def test_all_faults_come_together_and_only_a_run_that_starts_keeps_its_screen(
    folder, base, tmp_path, capsys  # noqa: F811
):  # fmt: skip
    change(base / "generation_config.json", eos_token_id=None)
    (base / SECOND).unlink()
    with pytest.raises(preflight.NotReady) as refusal:
        run(
            folder, tmp_path / "out", "--model_name_or_path", base, "--dataset_name", "/nowhere",
            "--reward_funcs", "lenght", "--num_generations", 1, "--top_p", 2, "--max_steps", 1,
            "--val_dataset", "/neither",
        )  # fmt: skip
    shown, found = capsys.readouterr().out, str(refusal.value)
    assert found.splitlines()[0] == "not ready: 7 things to change"
    parts = ("--num_generations 1", "--top_p 2", SECOND, "eos_token_id", "train: ", "val: ", "lenght")
    for number, part in enumerate(parts, start=1):
        assert part in found.splitlines()[number] and f"{number}. " in found.splitlines()[number]
    assert "train        not looked at: data must be right first" in shown and "<|image_pad|>×187" in shown
    assert not (tmp_path / "out/preflight.txt").exists()
    run(folder, tmp_path / "out", "--max_steps", 1, "--save_strategy", "no")
    shown, kept = capsys.readouterr().out, (tmp_path / "out/preflight.txt").read_text()
    assert kept in shown and kept.endswith("\nready\n")
    assert all(len(line) <= preflight.WIDTH for line in kept.splitlines())


def test_the_last_line_of_a_launched_run_names_what_failed(tmp_path):
    """status.json and those of ranks, in whatever order a folder lists them."""
    since = time.time()
    for nobodys in ("", "3", "[]", '{"time": 1e12}'):
        (tmp_path / "status.json").write_text(nobodys)
        assert "before its first update" in status.ending(tmp_path, since, 1)[0]
        assert status.smaller(tmp_path, since, 1) == []
    status.write_status(tmp_path / "status.json", "running", "The run goes on.", None)
    assert status.ending(tmp_path, since, 1)[1] == status.DIED
    status.write_status(tmp_path / "status-rank1.json", "failed", "ValueError: no", 65, rank=1)
    status.write_status(tmp_path / "status-rank0.json", "failed", "RuntimeError: NCCL error", 1, rank=0)
    line, code = status.ending(tmp_path, since, 1)
    assert line.startswith("Rank 1 failed: ValueError: no") and code == 65
    assert status.ending(tmp_path, since + 60, 0) == ("", 0)  # of an earlier run


def test_a_folder_that_cannot_be_made_is_a_fault_like_others(folder, tmp_path):  # noqa: F811
    (tmp_path / "file").write_text("")
    with pytest.raises(preflight.NotReady, match="1 thing to change\n  1. OUT .* .Not a directory.: set OUT"):
        run(folder, tmp_path / "file/out", "--max_steps", 1, "--dry_run", "true")
    more = ("--val_dataset", folder / "val", "--eval_strategy", "steps", "--submission_dir")
    with pytest.raises(preflight.NotReady, match="1 thing to change\n  1. .*/file cannot be written: set"):
        run(folder, tmp_path / "out", *more, tmp_path / "file/best", "--max_steps", 1, "--dry_run", "true")


@pytest.mark.parametrize(
    "file, content, sentence",
    [
        ("model.safetensors", b"", "model.safetensors has no readable header"),
        ("chat_template.json", b'{"chat_template": "{% if %}"}', "has no chat template that renders"),
    ],
)
def test_what_is_broken_breaks_no_later_check(folder, tmp_path, file, content, sentence):  # noqa: F811
    shutil.copytree(folder / "base", tmp_path / "base")
    (tmp_path / "base" / file).write_bytes(content)
    more = ("--model_name_or_path", tmp_path / "base", "--max_steps", 1, "--dry_run", "true")
    with pytest.raises(preflight.NotReady, match=f"1 thing to change\n  1. .*{sentence}"):
        run(folder, tmp_path / "out", *more)


def test_deepspeed_settings_come_from_the_file_or_as_they_are(tmp_path):
    _, args, _ = parse("--output_dir", tmp_path, "--use_cpu", "true")
    assert args.deepspeed_settings == {}
    args.deepspeed = str(machines.ZERO3)
    assert args.deepspeed_settings["zero_optimization"]["stage"] == 3
    args.deepspeed = {"zero_optimization": {"stage": 2}}
    assert args.deepspeed_settings == args.deepspeed
