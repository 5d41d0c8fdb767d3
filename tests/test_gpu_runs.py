"""train.sh itself on one GPU, with ZeRO-3: stopping, going on, a card with little memory, LoRA. Run by hand:
bash test.sh -m gpu"""

import os
import signal
from pathlib import Path

import pytest

from benchmarks.random_base import make_base, make_rows
from open_r1.checkpoint import load_policy
from open_r1.complete import complete_marker
from tests.test_control_processes import Run, none_goes_on, train_sh  # noqa: F401 (a fixture)
from tests.test_distributed import folder  # noqa: F401 (a fixture)
from tests.test_distributed import make_rows as rows_of
from tests.test_grpo import lines

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
COMMON = (
    "--reward_funcs", "tests.rewards.letters", "--reward_weights", "1", "--finalize", "false",
    "--eval_limit", "5", "--max_steps", "4", "--save_steps", "100",
)  # fmt: skip


def logs_of(run: Run) -> list[dict]:
    """Of the updates, once the run has ended well."""
    code, found = run.end(timeout=500)
    assert (code, found["cause"]) == (0, "finished"), run.log.read_text()[-6000:]
    return [line for line in lines(run.out / "logs.jsonl") if "loss" in line]


def test_a_stopped_run_goes_on_as_if_it_had_not(folder):  # noqa: F811
    whole = logs_of(train_sh(folder, "whole", *COMMON, gpus=1))
    run = train_sh(folder, "stopped", *COMMON, gpus=1)
    run.wait_for_update(2)
    os.kill(run.bash.pid, signal.SIGTERM)
    code, found = run.end(timeout=200)
    assert (code, found["cause"]) == (143, "signal"), run.log.read_text()[-6000:]
    assert any(complete_marker(path) for path in run.out.glob("checkpoint-*"))
    logs = logs_of(train_sh(folder, "stopped", *COMMON, gpus=1))
    assert [log["step"] for log in logs] == [1, 2, 3, 4]
    for name in ("reward", "completions/mean_length"):
        assert [log[name] for log in logs] == [log[name] for log in whole]
    assert [log["loss"] for log in logs] == pytest.approx([log["loss"] for log in whole], abs=1e-4)
    assert [log["grad_norm"] for log in logs] == pytest.approx([log["grad_norm"] for log in whole], rel=1e-2)


def test_rows_of_two_images_and_of_none_in_one_run(folder):  # noqa: F811
    rows_of(3, 16, (2, 0, 1, 0) * 4).save_to_disk(folder / "some_rows")
    run = train_sh(
        folder, "several", *COMMON, "--dataset_name", folder / "some_rows", "--prompts_per_row", "4", gpus=1
    )
    assert len(logs_of(run)) == 4


def test_lora_against_its_base_and_what_is_submitted(folder):  # noqa: F811
    """With a KL term, whose reference is the model without its adapter."""
    lora = ("--use_peft", "true", "--lora_r", "4", "--lora_alpha", "8")
    lora += ("--learning_rate", "1e-2", "--warmup_steps", "0")
    run = train_sh(folder, "lora", *COMMON, *lora, "--beta", "0.04", "--select_level", "0", gpus=1)
    logs = logs_of(run)
    assert logs[0]["kl"] < 0.1 * logs[-1]["kl"]
    load_policy(Path(f"{run.out}_best"), "auto")  # refuses what is no whole model


def test_a_capped_card_is_left_by_smaller_rows(tmp_path):
    """The cap is the allocator's own: the second row of the second update finds no room, and the run goes on
    from its checkpoint in rows that fit."""
    make_base(tmp_path / "base", layers=4, blocks=4)
    for seed, (name, count) in enumerate({"train": 32, "val": 8}.items()):
        make_rows(tmp_path / name, seed, count, 480, 320)
    run = train_sh(
        tmp_path, "capped", *COMMON, "--save_steps", "1", "--max_completion_length", "64",
        "--reward_funcs", "tests.capped_card.letters", "--prompts_per_row", "8",
        gpus=1, CAPPED_CARD=tmp_path / "cap",
    )  # fmt: skip
    logs, shown = logs_of(run), run.log.read_text()
    assert "had no memory left: CUDA out of memory" in shown, shown[-6000:]
    again = [line for line in shown.splitlines() if line.startswith("train.sh: no memory was left")]
    assert 1 <= len(again) <= 2 and "--prompts_per_row 4" in again[0]
    assert "goes on from checkpoint-1" in shown and [log["step"] for log in logs] == [1, 2, 3, 4]
