"""The script as its users meet it: rewards, refusals, a reward of their own, resume, logs, validation,
submission."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from open_r1 import grpo, keep_best, validation
from open_r1.arguments import GRPOArguments, ModelArguments, RecipeArguments
from open_r1.check_args import check_args
from open_r1.checkpoint import load_policy
from open_r1.flag_parser import FlagParser
from open_r1.grpo import accuracy_reward, format_reward, reward_funcs_registry
from open_r1.rewards import (
    Reward,
    RewardCaller,
    as_conversations,
    check_signature,
    resolve_rewards,
    try_rewards,
)
from open_r1.submission import read_record
from open_r1.weights import master_weights
from tests.test_distributed import make_rows
from tests.tiny import save_public_form, tiny_tokenizer

ROOT = Path(__file__).resolve().parent.parent


# --- rewards ------------------------------------------------------------------------------------------------

TEXTS = {
    # text: (accuracy for the count 3, format), not truncated
    "<answer>3</answer>": (1, 1),
    "<answer> 3 </answer>\n": (1, 1),
    "<think> 2 and 1 </think> <answer> 3 </answer>": (1, 1),
    "<answer> 4 </answer>": (0, 1),
    "<answer> 4 </answer> <answer> 3 </answer>": (0, 0),  # the grader reads the first
    "<answer> 3 </answer> <answer> 3 </answer>": (1, 0),
    "<answer> 3 </answer> is what I count": (1, 0),
    "<answer> 3 </answer> </answer> </answer>": (1, 0),
    "<answer> <answer> 3 </answer>": (1, 0),
    "<answer> 3 items </answer>": (0, 0),
    "<answer> 3.0 </answer>": (0, 0),
    "There are 3 items.": (0, 0),
    "": (0, 0),
}


@pytest.mark.parametrize("text", TEXTS)
def test_accuracy_and_format(text):
    completions = as_conversations([text])
    assert accuracy_reward(completions, answer=[3], solution=["<answer> 3 </answer>"]) == [TEXTS[text][0]]
    assert format_reward(completions, truncated=[False]) == [TEXTS[text][1]]
    assert format_reward(completions, truncated=[True]) == [0]  # repeated to the length cap: earns nothing


def test_unknown_reward_lists_the_known_ones():
    with pytest.raises(ValueError, match="--reward_funcs lenght .*accuracy, close, format"):
        resolve_rewards(["lenght"], None, reward_funcs_registry)
    with pytest.raises(ValueError, match="tests.rewards.nothing could not be imported"):
        resolve_rewards(["tests.rewards.nothing"], None, reward_funcs_registry)
    with pytest.raises(ValueError, match="2 values for 1"):
        resolve_rewards(["accuracy"], [1.0, 0.5], reward_funcs_registry)
    with pytest.raises(ValueError, match="--reward_weights are all 0"):
        resolve_rewards(["accuracy", "format"], [0.0, 0.0], reward_funcs_registry)
    assert resolve_rewards(["tests.rewards.letters"], [0.5], {})[0].weight == 0.5


def test_a_reward_gets_what_it_names():
    seen = {}

    def picky(completions, group, answer, colour="red"):
        seen.update(locals())
        return [None, 1]

    def takes_all(completions, **kwargs):
        seen["kwargs"] = set(kwargs)
        return [0.5, True]

    available = {
        "completions": as_conversations(["a", "b"]), "group": [0, 0], "answer": [3, 3], "kind": ["x", "y"],
        "entropy": [torch.zeros(1)] * 2,
    }  # fmt: skip
    values = RewardCaller([Reward("picky", picky, 1.0), Reward("all", takes_all, 0.0)], 0)(available)
    assert values[0, 0].isnan() and values[1].tolist() == [1, 1] and values[0, 1] == 0.5
    assert seen["group"] == [0, 0] and seen["colour"] == "red" and seen["kwargs"] == {"answer", "kind"}
    check_signature(Reward("picky", picky, 1.0), ["question", "answer"])
    with pytest.raises(ValueError, match="asks for answer, which is neither a column"):
        check_signature(Reward("picky", picky, 1.0), ["question"])


def test_rewards_are_tried_on_gold_answers():
    rows = [{"question": "How many?", "answer": n, "solution": str(n)} for n in (0, 7, 12)]
    rewards = resolve_rewards(["accuracy", "format"], [1.0, 0.1], reward_funcs_registry)
    table, faults = try_rewards(rewards, rows, [[]] * 3, tiny_tokenizer())
    assert table[1].split() == ["accuracy", "1", "1.00", "0.00"] and not faults
    wrong = Reward("accuracy", lambda completions: [0.0] * len(completions), 1.0)
    failing = Reward("failing", lambda completions: [1 / len(c[0]["content"]) for c in completions], 0.0)
    table, faults = try_rewards([wrong, failing], rows, [[]] * 3, tiny_tokenizer())
    assert "accuracy reward gives 0.00 on gold" in faults[0] and len(faults) == 2
    assert "reward failing raised ZeroDivisionError" in faults[1] and "on empty text" in faults[1]
    assert table[2].split()[3] == "failed"


# --- flags --------------------------------------------------------------------------------------------------


def parse(*flags) -> tuple[RecipeArguments, GRPOArguments, ModelArguments]:
    return FlagParser((RecipeArguments, GRPOArguments, ModelArguments)).parse([str(flag) for flag in flags])


FLAGS = (
    "--dataset_name", "d", "--val_dataset", "v", "--output_dir", "o", "--use_cpu", "true",
    "--report_to", "none",
)  # fmt: skip


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (("--per_device_train_batch_size", 2), "--per_device_train_batch_size 2: .*--prompts_per_row"),
        (("--num_generations", 1), "--num_generations 1"),
        (("--loss_type", "bnpo"), "--loss_type bnpo: set one of grpo, dapo, dr_grpo"),
        (("--use_vllm", "true"), "--use_vllm True: this trainer does not honour it"),
        (("--delta", 2), "--delta 2.0"),
        (("--use_peft", "true", "--lora_dropout", 0.05), "--lora_dropout 0.05: completions come from"),
        (("--use_peft", "true", "--lora_target_modules", "lm_head"), "lm_head: the head and the embedding"),
        (("--use_peft", "true", "--lora_target_modules", "q_proj", "wq"), "q_proj wq: set some of q_proj k_"),
        (("--use_peft", "true", "--lora_target_modules", "qkv"), "qkv: .* set --lora_vision true too"),
        (
            ("--use_peft", "true", "--lora_vision", "true", "--lora_target_modules", "q_proj"),
            "--lora_vision true with --lora_target_modules q_proj: no layer of",
        ),
        (("--use_bias_correction_kl", "true"), "--use_bias_correction_kl true without a KL term"),
        (("--lora_r", 8), "--lora_r does nothing without --use_peft true"),
        (("--use_peft", "true", "--use_dora", "true"), "--use_dora True"),
        (("--attn_implementation", "flash_attention_2"), "--attn_implementation flash_attention_2"),
        (("--max_completion_length", 512), "--max_completion_length 512: the grader cuts"),
        (("--gradient_accumulation_steps", 2, "--steps_per_generation", 3), "--steps_per_generation 3"),
        (("--steps_per_generation", 3, "--save_steps", 100), "--save_steps 100 is no multiple of the 3"),
        (("--temperature", 0), "--temperature 0.0"),
        (("--save_only_model", "true"), "--save_only_model"),
        (("--rollout_engine", "vllm"), "--rollout_engine vllm"),
        (("--prompt_mix", 1.5), "--prompt_mix 1.5"),
        (
            ("--gradient_accumulation_steps", 2, "--steps_per_generation", 4, "--max_steps", 3),
            "--max_steps 3 is no multiple of the 2 updates of a rollout",
        ),
        (("--data_seed", 7), "--data_seed 7: this trainer does not honour it"),
        (("--train_sampling_strategy", "sequential"), "--train_sampling_strategy sequential: this trainer"),
        (("--include_num_input_tokens_seen", "true"), "--include_num_input_tokens_seen \\w+: this trainer"),
        (("--push_to_hub", "true"), "--push_to_hub True: this trainer"),
        (("--enable_jit_checkpoint", "true"), "--enable_jit_checkpoint True: this trainer"),
        (("--report_to", "wandb"), "--report_to wandb: its package is not installed; set tensorboard"),
        (("--optim", "adamw_8bit"), "--optim adamw_8bit: ImportError: .*; set adamw_torch"),
        (("--save_total_limit", 0), "--save_total_limit 0: set 1 or more"),
        (("--eval_strategy", "epoch"), "--eval_strategy epoch: set no or steps"),
        (("--num_iterations", 0), "--num_iterations 0: set 1 or more"),
        (("--eval_limit", 0), "--eval_limit 0: set 1 or more"),
        (("--save_steps", 0.5), "--save_steps 0.5: set a whole number of updates"),
        (("--submission_dir", "o"), "--output_dir o lies in --submission_dir o"),
        (("--val_dataset", ROOT, "--output_dir", ROOT / "o"), "--output_dir .* lies in --val_dataset"),
        (("--model_name_or_path", ROOT, "--output_dir", ROOT), "--output_dir .* lies in --model_name_or"),
        (("--submission_dir", "o/checkpoint-5"), "--submission_dir o/checkpoint-5 lies where checkpoints"),
        (("--submission_dir", "o/.saving/x"), "--submission_dir o/.saving/x lies where checkpoints come"),
        (("--eval_strategy", "steps", "--eval_steps", 0), "--eval_steps 0: set 1 or more, or"),
        (("--gradient_accumulation_steps", 0), "--gradient_accumulation_steps 0: set 1 or more"),
        (("--max_hours", "nan"), "--max_hours nan: set the hours"),
        (("--learning_rate", "nan"), "--learning_rate nan: set 0 or more"),
        (("--adam_beta2", 1), "--adam_beta2 1.0: set 0 or more, and below 1"),
        (("--save_steps", "nan"), "--save_steps nan: set a whole number of updates"),
        (("--eval_strategy", "steps", "--eval_steps", -5), "--eval_steps -5: set a whole number of updates"),
        (("--max_steps", 0, "--num_train_epochs", "inf"), "--max_steps 0 and --num_train_epochs inf"),
        (("--reward_weights", "inf", 1), "--reward_weights inf 1.0: set finite numbers"),
        # What argparse and transformers say themselves.
        (("--max_stepz", 5), "^--max_stepz is no flag: did you mean --max_steps\\?$"),
        (("--max-step=5",), "^--max-step=5 is no flag: did you mean --max_steps\\?$"),  # none is cut short
        (("200",), "'200' belongs to no flag"),
        (("--max_steps", "abc"), "argument --max_steps/--max-steps: invalid int value: 'abc'"),
        (("--save_steps", "inf"), "a flag's value cannot be used: OverflowError"),
        (("--deepspeed", "1"), "a flag's value cannot be used: "),
        (("--deepspeed", "nowhere"), "a flag's value cannot be used: ValueError: Expected a string path"),
    ],
)
def test_bad_flags_are_refused_in_one_sentence(flags, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_args(*parse(*FLAGS, *flags))


def test_r1v_flags_mean_what_they_mean_there():
    """One prompt group a device and micro-step: GRPOConfig's own divisibility check would refuse this."""
    recipe, args, model = parse(
        *FLAGS, "--per_device_train_batch_size", 1, "--gradient_accumulation_steps", 2,
        "--num_generations", 8, "--reward_funcs", "accuracy", "format",
    )  # fmt: skip
    check_args(recipe, args, model)
    assert (args.prompts_per_update, args.prompts_per_rollout, args.updates_per_rollout) == (2, 2, 1)


# --- runs ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("grpo")
    save_public_form(root / "base", seed=0)
    make_rows(1, 20).save_to_disk(root / "train")
    make_rows(2, 3).save_to_disk(root / "val")
    return root


def flags(folder: Path, out: Path, *more) -> list[str]:
    return [
        *map(str, (
            "--model_name_or_path", folder / "base", "--dataset_name", folder / "train", "--output_dir", out,
            "--gradient_accumulation_steps", 2, "--num_generations", 4, "--max_completion_length", 8,
            "--learning_rate", 1e-3, "--lr_scheduler_type", "constant",
            "--reward_funcs", "tests.rewards.letters", "accuracy", "--reward_weights", 1, 0,
            "--report_to", "none", "--use_cpu", "true", "--bf16", "false", *more,
        ))
    ]  # fmt: skip


def run(folder, out, *more):
    return grpo.run(*parse(*flags(folder, out, *more)))


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_times(rows: list[dict]) -> list[dict]:
    return [
        {k: v for k, v in row.items() if not k.startswith("time/") and k != "train_runtime"}
        for row in rows
        if "loss" in row
    ]


def test_resumed_equals_uninterrupted(folder, tmp_path):
    """The same command goes on from its newest complete checkpoint; a broken newer one is passed over."""
    whole = run(folder, tmp_path / "whole", "--max_steps", 4, "--save_steps", 2)
    run(folder, tmp_path / "parts", "--max_steps", 3, "--save_steps", 2)
    # As if the run had been killed after update 3, before its save.
    shutil.rmtree(tmp_path / "parts/checkpoint-3")
    (tmp_path / "parts/checkpoint-3").mkdir()
    parts = run(folder, tmp_path / "parts", "--max_steps", 4, "--save_steps", 2)
    assert without_times(lines(tmp_path / "parts/logs.jsonl")) == without_times(
        lines(tmp_path / "whole/logs.jsonl")
    )
    assert lines(tmp_path / "parts/rollouts.jsonl") == lines(tmp_path / "whole/rollouts.jsonl")
    for (name, a), (_, b) in zip(master_weights(whole.model), master_weights(parts.model), strict=True):
        assert torch.equal(a, b), name


def test_a_finished_run_is_not_run_again_and_another_world_size_is_refused(folder, tmp_path, capsys):
    run(folder, tmp_path / "out", "--max_steps", 1, "--save_steps", 1)
    run(folder, tmp_path / "out", "--max_steps", 1, "--save_steps", 1)
    assert "has all 1 updates" in capsys.readouterr().out
    marker = tmp_path / "out/checkpoint-1/COMPLETE"
    marker.write_text(marker.read_text().replace('"world_size": 1', '"world_size": 2'))
    with pytest.raises(ValueError, match="written by 2 processes and this run has 1"):
        run(folder, tmp_path / "out", "--max_steps", 2)


def give_scores(monkeypatch, *scores: float) -> None:
    """Validations in turn find these accuracies."""
    given, original = iter(scores), validation.summarize
    monkeypatch.setattr(
        validation, "summarize", lambda examples: original(examples) | {"accuracy_pct": next(given)}
    )


def test_validation_keeps_the_best_in_the_submission(folder, tmp_path, monkeypatch):
    """The model of the first validation stands there at the end, rounded from its masters."""
    masters = []

    def keep(tensors):
        tensors = [(name, tensor.clone()) for name, tensor in tensors]
        masters.append(dict(tensors))
        return tensors

    give_scores(monkeypatch, 10.0, 30.0, 20.0)  # base, first update, second update
    write = keep_best.write_submission
    monkeypatch.setattr(
        keep_best, "write_submission",
        lambda base, submission, tensors, record: write(base, submission, keep(tensors), record),
    )  # fmt: skip
    trainer = run(
        folder, tmp_path / "out", "--max_steps", 2, "--val_dataset", folder / "val",
        "--eval_strategy", "steps", "--eval_steps", 1, "--submission_dir", tmp_path / "submission",
        "--save_strategy", "no",
    )  # fmt: skip
    assert trainer.keep_best.best_score == 30.0 and len(masters) == 1
    assert read_record(tmp_path / "submission")["step"] == 1
    for name, parameter in load_policy(tmp_path / "submission", torch.bfloat16).named_parameters():
        assert torch.equal(parameter, masters[0][name].bfloat16()), name


def test_a_submission_that_is_gone_comes_back(folder, tmp_path, monkeypatch):
    """Deleted after the last update, or never written for want of room: not only the base stands there."""
    submission = tmp_path / "submission"
    flags = (
        "--max_steps", 2, "--save_steps", 1, "--val_dataset", folder / "val", "--eval_strategy", "steps",
        "--eval_steps", 1, "--submission_dir", submission,
    )  # fmt: skip
    give_scores(monkeypatch, 10.0, 30.0, 40.0, 10.0, 40.0)  # base, two updates; base, the second update
    run(folder, tmp_path / "out", *flags)
    weights = {file.name: file.read_bytes() for file in submission.glob("*.safetensors")}
    shutil.rmtree(submission)
    for _ in range(2):  # and then it is not validated again
        trainer = run(folder, tmp_path / "out", *flags)
        assert trainer.keep_best.best_score == 40.0 and read_record(submission)["step"] == 2
        assert trainer.run_control.stale == 0  # it was counted before
        assert {file.name: file.read_bytes() for file in submission.glob("*.safetensors")} == weights


def test_a_better_submission_is_not_replaced(folder, tmp_path, monkeypatch):
    """Several rounds: what stands there is scored on the same rows first, and is the one to beat."""
    submission = tmp_path / "submission"
    shutil.copytree(folder / "base", submission)
    before = {file.name: file.read_bytes() for file in submission.iterdir()}
    give_scores(monkeypatch, 10.0, 50.0, 40.0)  # base, submission, first update
    trainer = run(
        folder, tmp_path / "out", "--max_steps", 1, "--val_dataset", folder / "val",
        "--eval_strategy", "steps", "--eval_steps", 1, "--submission_dir", submission,
        "--save_strategy", "no",
    )  # fmt: skip
    assert trainer.keep_best.best_score == 50.0
    assert {file.name: file.read_bytes() for file in submission.iterdir()} == before
    base = load_policy(folder / "base", torch.float32)
    rolled_out = dict(trainer.engine.model.named_parameters())
    # The policy, not the submission.
    assert any(not torch.equal(rolled_out[n], p) for n, p in base.named_parameters())


def test_rollouts_by_generate(folder, tmp_path):
    """--rollout_engine transformers: slow, behind the same interface, with the log-probs of the trainer."""
    more = ("--rollout_engine", "transformers", "--temperature", 0.8, "--save_strategy", "no")
    trainer = run(folder, tmp_path / "out", "--max_steps", 2, *more)
    assert all(log["logps_gap"] < 1e-4 for log in trainer.state.log_history if "loss" in log)


def test_rewards_may_ask_for_entropy_and_images(folder, tmp_path, monkeypatch):
    seen = {}

    def curious(completions, entropy, self_certainty, images, group, completion_ids, **kwargs):
        seen.update(entropy=entropy, images=images, group=group, ids=completion_ids, certainty=self_certainty)
        return [float(e.mean()) for e in entropy]

    monkeypatch.setitem(reward_funcs_registry, "curious", curious)
    run(
        folder, tmp_path / "out", "--max_steps", 1, "--save_strategy", "no",
        "--reward_funcs", "curious", "--reward_weights", 1,
    )  # fmt: skip
    assert (
        [len(e) for e in seen["entropy"]]
        == [len(ids) for ids in seen["ids"]]
        == [len(c) for c in seen["certainty"]]
    )
    assert seen["group"] == [0] * 4 + [1] * 4 and len(seen["images"]) == 8
    assert all((e > 0).all() for e in seen["entropy"])


def test_a_reference_and_several_updates_a_rollout(folder, tmp_path):
    trainer = run(
        folder, tmp_path / "out", "--max_steps", 4, "--save_strategy", "no", "--beta", 0.04,
        "--steps_per_generation", 4, "--prompts_per_row", 1, "--num_iterations", 1,
    )  # fmt: skip
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [round(log["kl"], 9) == 0 for log in logs] == [True, False, False, False]
    assert logs[0]["reward"] == logs[1]["reward"] != logs[2]["reward"]  # two updates a rollout


def test_overlap_with_validation_and_the_same_folder(folder, tmp_path, capsys):
    run(folder, tmp_path / "dry", "--val_dataset", folder / "val", "--dry_run", "true", "--max_steps", 1)
    shown = capsys.readouterr().out
    assert (
        "0 share an image" in shown
        and "ready: nothing was launched" in shown
        and not (tmp_path / "dry/logs.jsonl").exists()
    )
    with pytest.raises(ValueError, match="is the validation set"):
        run(folder, tmp_path / "dry", "--val_dataset", folder / "train", "--dry_run", "true")


def test_a_new_user_adds_a_reward(folder, tmp_path):
    """What the README says: write a function in grpo.py, register it, name it, find it in logs.jsonl."""
    copy = tmp_path / "repository"
    shutil.copytree(ROOT / "open_r1", copy / "open_r1")
    shutil.copy(ROOT / "requirements.txt", copy)
    script = copy / "open_r1/grpo.py"
    text = script.read_text()
    function = (
        "def brevity_reward(completions, **kwargs):\n"
        "    return [1 / (1 + len(c[0]['content'])) for c in completions]\n"
    )
    text = text.replace(
        "reward_funcs_registry = {",
        function + '\n\nreward_funcs_registry = {\n    "brevity": brevity_reward,',
        1,
    )
    script.write_text(text)
    command = [
        sys.executable, script, *flags(folder, tmp_path / "out", "--max_steps", 3, "--save_strategy", "no"),
        "--reward_funcs", "accuracy", "brevity", "--reward_weights", "1", "0.5",
    ]  # fmt: skip
    done = subprocess.run(
        list(map(str, command)),
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3/3 100%" in done.stdout
    logs = lines(tmp_path / "out/logs.jsonl")
    values = [log["rewards/brevity"] for log in logs if "loss" in log]
    assert len(values) == 3 and all(0 < value < 1 for value in values)
