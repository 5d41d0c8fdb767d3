"""One process, two with DDP and two with ZeRO-3 make the same updates; ZeRO-3 in bf16 keeps what must be
float32.

Gradients before clipping are compared, not weights after an Adam step, which hide any constant factor.
Completions have unequal lengths, accumulation is above 1, and some prompts have no image, so that a rank is
without images in some rows.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset, Features, Image, List, Value
from safetensors.torch import load_file

from open_r1.checkpoint import load_policy
from open_r1.submission import read_record
from tests.tiny import noise_image, save_public_form

pytestmark = pytest.mark.timeout(1200)  # a test has up to three launches, on a machine that may be busy
ROOT = Path(__file__).resolve().parent.parent
PROMPTS = 4  # of an update
UPDATES = 3
FIRST = "dynamic_sampling/first_zero_variance"


def make_rows(seed: int, count: int, numbers: tuple[int, ...] = (1, 1, 0)) -> Dataset:
    """`numbers` of images, again and again."""
    images = [
        [noise_image(100 * seed + i + 50 * k, 56 + 28 * ((i + k) % 2), 60) for k in range(number)]
        for i, number in zip(range(count), itertools.cycle(numbers), strict=False)
    ]
    columns = {
        "images": images,
        "problem": [f"How many of kind {'x' * (i % 5)}?" for i in range(count)],
        "solution": [str(i % 7) for i in range(count)],
    }
    features = Features({"images": List(Image()), "problem": Value("string"), "solution": Value("string")})
    return Dataset.from_dict(columns, features=features)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("distributed")
    save_public_form(root / "base", seed=0)
    make_rows(1, 16).save_to_disk(root / "train")
    make_rows(2, 5).save_to_disk(root / "val")
    config = json.loads((ROOT / "zero3.json").read_text())
    # A tiny model would be gathered once and kept: let ZeRO-3 release and gather as with a large one.
    config["zero_optimization"] |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    (root / "zero3.json").write_text(json.dumps(config))
    for name in ("zero2.json", "zero3_offload.json"):
        shutil.copyfile(ROOT / name, root / name)
    return root


def launch_flags(folder: Path, name: str, processes: int) -> tuple:
    return (
        "--model_name_or_path", folder / "base", "--dataset_name", folder / "train",
        "--val_dataset", folder / "val", "--output_dir", folder / name,
        "--submission_dir", folder / f"{name}_submission", "--eval_strategy", "steps",
        "--eval_steps", UPDATES, "--num_generations", 4, "--max_completion_length", 10,
        "--max_steps", UPDATES, "--gradient_accumulation_steps", PROMPTS // processes,
        "--learning_rate", 1e-2, "--optim", "sgd",
        "--lr_scheduler_type", "constant", "--max_grad_norm", 1e6, "--reward_funcs", "tests.rewards.letters",
        "--report_to", "none", "--use_cpu", "true", "--save_strategy", "no", "--seed", 5, "--keep_top", 1,
        "--kl_readout_steps", 1,
    )  # fmt: skip


def launch(folder: Path, name: str, kind: str, processes: int, *flags: str, fails=False, **env: str):
    """Runs the worker; what it saved, with the logs and the folder of its submission. One that `fails`: what
    it said."""
    flags = (*launch_flags(folder, name, processes), *flags)
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", "0"]
    launcher = [] if processes == 1 and kind != "zero" else launcher + ["--standalone"]
    command = [
        sys.executable, *launcher, str(ROOT / "tests/distributed_worker.py"), kind,
        str(folder / f"{name}.pt"),
    ]  # fmt: skip
    done = subprocess.run(
        [*command, *map(str, flags)], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert (done.returncode != 0) == fails, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout if fails else result_of(folder, name)


def result_of(folder: Path, name: str) -> dict:
    result = torch.load(folder / f"{name}.pt", weights_only=False)
    logs = [json.loads(line) for line in (folder / name / "logs.jsonl").read_text().splitlines()]
    return result | {
        "logs": [log for log in logs if "loss" in log],
        "submission": folder / f"{name}_submission",
    }


@pytest.fixture(scope="module")
def one(folder):
    return launch(folder, "one", "ddp", 1, "--bf16", "false")


def assert_same_updates(got: dict, expected: dict, updates: int = UPDATES) -> None:
    assert len(got["gradients"]) == len(expected["gradients"]) == updates
    for a, b in zip(got["gradients"], expected["gradients"], strict=True):
        assert a.keys() == b.keys()
        difference = sum((a[n] - b[n]).square().sum() for n in b).sqrt()
        norm = sum(value.square().sum() for value in b.values()).sqrt()
        assert norm > 0 and difference / norm < 1e-5
    for a, b in zip(got["logs"], expected["logs"], strict=True):
        for name in (
            "loss", "grad_norm", "reward", "completions/mean_length", "completions/entropy",
            "zero_variance", "logps_gap", "completions/distinct_4", "kl_to_base",
        ):  # fmt: skip
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=2e-6), name
    assert got["best"] == expected["best"]


def test_lengths_are_unequal_and_every_rollout_is_on_policy(one):
    """A loader that accelerate prepared would read ahead: rollouts one update old, far from the policy."""
    assert all(log["logps_gap"] < 1e-4 for log in one["logs"])
    assert [log["kl_to_base"] > 0 for log in one["logs"]] == [False, True, True]
    assert any(log["completions/max_length"] > log["completions/mean_length"] for log in one["logs"])


def test_two_processes_with_ddp(folder, one):
    """And in a fourth update one rank's loss is not a number: both stop before weights change."""
    more, rows = ("--bf16", "false", "--max_steps", UPDATES + 1), PROMPTS // 2
    shown = launch(folder, "ddp", "ddp", 2, *more, FAULT=f"1:{UPDATES * rows + 1}:nan", fails=True)
    assert re.search(r"The loss of update 4 is not finite; data set rows \(rewards\) of rank 1: \d", shown)
    got = result_of(folder, "ddp")
    assert_same_updates(got, one)
    for name, value in one["masters"].items():
        assert torch.allclose(got["masters"][name], value, atol=1e-6)


def test_two_updates_a_rollout_and_dynamic_sampling(folder):
    """Each update has the same prompts on any number of processes, those that replace others too. The rewards
    ask for the entropy: ranks with unequal shares of them, as here, would wait for ever under ZeRO-3. Tokens
    are weighed by views of the images: ranks have unequal shares of these too."""
    flags = ("--bf16", "false", "--max_steps", 2, "--dynamic_sampling", 2, "--seed", 7)
    flags += ("--token_weights", "prpo", "--kl_readout_steps", 2)
    flags += ("--reward_funcs", "tests.rewards.half_stuck", "--steps_per_generation")
    expected = launch(folder, "one_twice", "ddp", 1, *flags, 2 * PROMPTS)
    first, second = expected["logs"]
    assert first["dynamic_sampling/tries"] == 2 and first["zero_variance"] < first[FIRST]
    assert first["token_weights/mean"] > 1 and 0 < first["token_weights/scored"] < 1
    for kind, more in (("ddp", ()), ("zero", ("--deepspeed", folder / "zero3.json"))):
        got = launch(folder, f"{kind}_twice", kind, 2, *flags, PROMPTS, *more)
        assert_same_updates(got, expected, updates=2)
        assert [log[FIRST] for log in got["logs"]] == [first[FIRST]] * 2
        for name in ("mean", "max", "k3_hidden", "k3_perturbed", "scored"):
            name = f"token_weights/{name}"
            assert got["logs"][0][name] == pytest.approx(first[name], rel=1e-4), name


@pytest.fixture(scope="module")
def zero3(folder):
    return launch(folder, "zero3", "zero", 2, "--bf16", "false", "--deepspeed", folder / "zero3.json")


def test_two_processes_with_zero3(folder, zero3, one):
    got = zero3
    assert_same_updates(got, one)
    for name, value in one["masters"].items():
        assert torch.allclose(got["masters"][name], value, atol=1e-6)
    kept = load_file(folder / f"zero3/masters/update-{UPDATES}.safetensors")
    assert kept.keys() == got["masters"].keys()
    assert all(torch.equal(kept[name], value) for name, value in got["masters"].items())
    # The tied head is gathered for the embedding and for the head, forward and backward, in each of the
    # rank's rows, and twice to refresh the rollout copy, which has held the base for the KL in between; not
    # once a chunk of logits (ten of them).
    rows = PROMPTS // 2
    assert all(0 < gathered <= 4 * rows + 2 for gathered in got["head_gathered"])


@pytest.mark.parametrize("name", ["zero2", "zero3_offload"])
def test_other_configurations_make_the_same_updates(folder, one, name):
    flags = ("--bf16", "false", "--deepspeed", folder / f"{name}.json")
    got = launch(folder, name, "zero", 2, *flags)
    assert_same_updates(got, one)
    for parameter, value in one["masters"].items():
        assert torch.allclose(got["masters"][parameter], value, atol=1e-6)


def test_two_images_on_one_rank_and_none_on_the_other(folder):
    """In the first update rank 0 has all images, in the second rank 1, in the third each has some."""
    numbers = (2, 2, 0, 0, 0, 0, 2, 2, 2, 0, 0, 1)
    make_rows(3, 12, numbers).save_to_disk(folder / "several")
    flags = ("--bf16", "false", "--dataset_name", folder / "several", "--shuffle_dataset", "false")
    expected = launch(folder, "several_one", "ddp", 1, *flags)
    got = launch(folder, "several_two", "zero", 2, *flags, "--deepspeed", folder / "zero3.json")
    assert expected["images"] == list(numbers) and got["images"] == [2, 2, 0, 0, 2, 0]
    assert_same_updates(got, expected)


def test_zero3_goes_on_where_one_rank_cannot_save_and_another_is_killed(folder, zero3):
    """A full disk on rank 1 ends the first save on both ranks. Then rank 1 is killed in the third update,
    after the second checkpoint, and the same command goes on: to the bit as if nothing had happened, and no
    rehearsal been made."""
    flags = ("--bf16", "false", "--deepspeed", folder / "zero3.json")
    flags += ("--save_strategy", "steps", "--save_steps", 1)
    rows = PROMPTS // 2  # of an update, on each rank
    shown = launch(
        folder, "resumed", "zero", 2, *flags, FULL_DISK="1", FAULT=f"1:{3 * rows}:SIGKILL", fails=True
    )  # fmt: skip
    assert "update 1: no checkpoint could be written (RuntimeError: PytorchStreamWriter failed" in shown
    assert {path.name for path in (folder / "resumed").glob("*checkpoint*")} == {"checkpoint-2"}
    got = launch(folder, "resumed", "zero", 2, *flags, "--rehearse", "true")
    assert len(got["gradients"]) == 1  # the first two were not made again
    for expected, found in ((zero3["gradients"][2], got["gradients"][0]), (zero3["masters"], got["masters"])):
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert [log["step"] for log in got["logs"]] == [1, 2, 3]
    assert [log.get("checkpoint_failures") for log in got["logs"]] == [None, 1, None]
    assert got["best"] == zero3["best"]


@pytest.mark.parametrize("name", ["zero3", "zero2", "zero3_offload"])
def test_in_bf16_float32_is_kept_where_it_must(folder, name):
    """Float32 masters take small steps, gradients are summed up in float32 over rows and ranks, rotary
    frequencies stay exact, and the submission is rounded from the masters."""
    flags = (
        "--bf16", "true", "--deepspeed", folder / f"{name}.json", "--learning_rate", 1e-6,
        "--optim", "adamw_torch_fused",
    )  # fmt: skip
    got = launch(folder, f"{name}_bf16", "zero", 2, *flags)
    assert got["dtypes"] == [({torch.float32}, {torch.float32})] * UPDATES
    base = load_policy(folder / "base", torch.float32)
    assert got["rope"].dtype == torch.float32
    assert torch.equal(got["rope"], base.model.language_model.rotary_emb.inv_freq)
    moved = [
        (got["masters"][n] != p).float().mean().item() for n, p in base.named_parameters() if "layers" in n
    ]
    assert min(moved) > 0.5  # bf16 weights would have stayed where they are
    # Nothing answered correctly: the base still stands there.
    assert read_record(got["submission"])["recipe"] == "base"
    load_policy(got["submission"], torch.bfloat16)


LORA = ("--bf16", "false", "--use_peft", "true", "--lora_r", 4, "--beta", 0.1)


def test_lora_with_ddp_and_zero3_equals_one_process_and_is_resumed_from_its_adapters(folder):
    """Frozen weights are sharded too, the reference is the policy without its adapters, and image features
    are those of the rollout, also where one rank's row has no image."""
    expected = launch(folder, "one_lora", "ddp", 1, *LORA)
    assert all("lora_" in name for name in expected["gradients"][0])
    assert_same_updates(launch(folder, "ddp_lora", "ddp", 2, *LORA), expected)
    zero = (*LORA, "--deepspeed", folder / "zero3.json", "--save_strategy", "steps", "--save_steps", 2)
    whole = launch(folder, "zero3_lora", "zero", 2, *zero)
    assert_same_updates(whole, expected)
    for name, value in expected["masters"].items():
        assert torch.allclose(whole["masters"][name], value, atol=1e-6), name
    checkpoint = folder / "zero3_lora/checkpoint-2"
    size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    got = launch(folder, "zero3_lora", "zero", 2, *zero, "--resume_from_checkpoint", checkpoint)
    assert len(got["gradients"]) == 1
    for a, b in ((whole["gradients"][2], got["gradients"][0]), (whole["masters"], got["masters"])):
        assert all(torch.equal(b[name], value) for name, value in a.items())
    assert size < 16 * sum(value.numel() for value in whole["gradients"][0].values()) + 200_000
