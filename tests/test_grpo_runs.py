"""Whole runs on a tiny model: what resume, noise, row order, rewards and keep-best do inside them."""

import PIL.Image
import pytest
import torch
from datasets import concatenate_datasets

from open_r1 import grpo
from open_r1.checkpoint import load_policy
from open_r1.grpo import reward_funcs_registry
from open_r1.weights import master_weights
from tests.test_distributed import make_rows
from tests.test_grpo import folder, lines, run, without_times  # noqa: F401 (folder is a fixture)
from tests.tiny import EOS, PAD, save_public_form


def assert_same_logs(a, b):
    assert without_times(lines(a / "logs.jsonl")) == without_times(lines(b / "logs.jsonl"))
    assert lines(a / "rollouts.jsonl") == lines(b / "rollouts.jsonl")


# --- resume -------------------------------------------------------------------------------------------------


def test_resume_with_several_updates_a_rollout(folder, tmp_path):  # noqa: F811
    """The rollout to go on with is counted in rollouts, not in updates."""
    more = ("--steps_per_generation", 4, "--gradient_accumulation_steps", 2, "--save_steps", 2)
    whole = run(folder, tmp_path / "whole", *more, "--max_steps", 4)
    run(folder, tmp_path / "parts", *more, "--max_steps", 2)
    parts = run(folder, tmp_path / "parts", *more, "--max_steps", 4)
    assert_same_logs(tmp_path / "parts", tmp_path / "whole")
    assert [log["rollout"] for log in lines(tmp_path / "parts/rollouts.jsonl")] == [0] * 8 + [1] * 8
    for (name, a), (_, b) in zip(master_weights(whole.model), master_weights(parts.model), strict=True):
        assert torch.equal(a, b), name


def test_a_cut_log_line_does_not_stop_a_resume(folder, tmp_path):  # noqa: F811
    """A kill or a full disk cuts the last line short."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(folder, whole, "--max_steps", 3, "--save_steps", 1)
    run(folder, parts, "--max_steps", 2, "--save_steps", 1)
    for name in ("logs.jsonl", "rollouts.jsonl"):
        with (parts / name).open("a") as file:
            file.write('{"step": 3, "lo')
    run(folder, parts, "--max_steps", 3, "--save_steps", 1)
    assert_same_logs(parts, whole)


def test_a_checkpoint_that_is_none_is_refused(folder, tmp_path):  # noqa: F811
    with pytest.raises(ValueError, match="--resume_from_checkpoint /nowhere is no complete checkpoint"):
        run(folder, tmp_path / "out", "--max_steps", 1, "--resume_from_checkpoint", "/nowhere")


# --- rows and noise -----------------------------------------------------------------------------------------


def test_rows_in_order_and_new_noise_in_each_rollout(folder, tmp_path):  # noqa: F811
    """The same weights and prompts at the same places: only the number of the rollout differs."""
    make_rows(1, 4).save_to_disk(tmp_path / "train")
    run(
        folder, tmp_path / "out", "--dataset_name", tmp_path / "train", "--shuffle_dataset", "false",
        "--gradient_accumulation_steps", 4, "--max_steps", 2, "--learning_rate", 0, "--prompt_mix", 0,
        "--save_strategy", "no",
    )  # fmt: skip
    samples = lines(tmp_path / "out/rollouts.jsonl")
    assert [sample["row"] for sample in samples] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    for first, second in zip(samples[:8], samples[8:], strict=True):
        assert (first["rollout"], second["rollout"]) == (0, 1) and first["text"] != second["text"]


def test_a_row_that_shares_its_image_with_validation_is_left_out(folder, tmp_path, capsys):  # noqa: F811
    train = concatenate_datasets([make_rows(2, 3).select([0]), make_rows(1, 5)])
    train.save_to_disk(tmp_path / "train")
    run(
        folder, tmp_path / "out", "--dataset_name", tmp_path / "train", "--val_dataset", folder / "val",
        "--shuffle_dataset", "false", "--max_steps", 3, "--save_strategy", "no",
    )  # fmt: skip
    assert "5 of 6 rows used: 0 bad, 1 share an image with validation" in capsys.readouterr().out
    assert [s["row"] for s in lines(tmp_path / "out/rollouts.jsonl")[::2]] == [1, 2, 3, 4, 5, 1]


# --- rewards ------------------------------------------------------------------------------------------------


def test_a_reward_sees_the_rows_and_completions_as_they_are(folder, tmp_path, monkeypatch):  # noqa: F811
    seen = {}

    def curious(
        completions, problem, kind, images, truncated, completion_ids, entropy, self_certainty, **kwargs
    ):
        seen.update(locals())
        return [sum(ids) % 7 / 7 for ids in completion_ids]

    monkeypatch.setitem(reward_funcs_registry, "curious", curious)
    rows = make_rows(1, 4).add_column("kind", ["red", "", None, "blue"])
    rows.save_to_disk(tmp_path / "train")
    run(
        folder, tmp_path / "out", "--dataset_name", tmp_path / "train", "--shuffle_dataset", "false",
        "--gradient_accumulation_steps", 4, "--max_completion_length", 64, "--max_steps", 1,
        "--save_strategy", "no", "--reward_funcs", "curious", "--reward_weights", 1,
    )  # fmt: skip
    of_completion = [row for row in rows for _ in range(4)]
    assert seen["problem"] == [row["problem"] for row in of_completion]
    assert seen["kind"] == [row["kind"] for row in of_completion]
    for images, row in zip(seen["images"], of_completion, strict=True):
        assert all(isinstance(image, PIL.Image.Image) for image in images)
        assert [image.tobytes() for image in images] == [image.tobytes() for image in row["images"]]
    ended = [bool({EOS, PAD} & set(ids)) for ids in seen["completion_ids"]]
    assert len(set(ended)) == 2 and seen["truncated"] == [not end for end in ended]
    for entropy, certainty in zip(seen["entropy"], seen["self_certainty"], strict=True):
        assert entropy.shape == certainty.shape and not torch.allclose(entropy, certainty)


# --- keep-best ----------------------------------------------------------------------------------------------


def test_the_kept_submission_is_measured_and_the_base_trained(folder, tmp_path, monkeypatch):  # noqa: F811
    submission, held = tmp_path / "submission", []
    save_public_form(submission, seed=1)

    def recording(method):
        def record_then_call(self, *args):
            held.append({name: p.clone() for name, p in self.engine.model.named_parameters()})
            return method(self, *args)

        return record_then_call

    for name in ("validate", "roll_out"):
        method = getattr(grpo.Qwen2VLGRPOTrainer, name)
        monkeypatch.setattr(grpo.Qwen2VLGRPOTrainer, name, recording(method))
    run(
        folder, tmp_path / "out", "--max_steps", 1, "--learning_rate", 0, "--val_dataset", folder / "val",
        "--eval_strategy", "steps", "--eval_steps", 1, "--submission_dir", submission,
        "--save_strategy", "no",
    )  # fmt: skip
    # Validation of the base and of the submission, the rollout of update 1, validation of update 1.
    expected = (folder / "base", submission, folder / "base", folder / "base")
    for weights, source in zip(held, expected, strict=True):
        for name, parameter in load_policy(source, torch.float32).named_parameters():
            assert torch.equal(weights[name], parameter), (source.name, name)
