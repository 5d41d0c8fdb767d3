"""The rehearsal makes the longest row and rollout, and leaves nothing behind."""

import pytest
import torch

from open_r1 import rehearsal
from open_r1.rollout import FastEngine
from open_r1.weights import master_weights
from tests.test_grpo import folder, lines, run, without_times  # noqa: F401 (folder is a fixture)
from tests.test_resume import same


def test_a_run_after_it_is_the_same_to_the_bit(folder, tmp_path, monkeypatch, capsys):  # noqa: F811
    more = ("--max_steps", 2, "--save_steps", 2, "--val_dataset", folder / "val", "--eval_strategy", "steps")
    more = (*more, "--eval_steps", 2, "--prompts_per_row", 2, "--per_device_eval_batch_size", 3)
    plain = run(folder, tmp_path / "plain", *more)
    assert "rehearsed" not in capsys.readouterr().out  # on the CPU only when asked for
    made, rows, moments = [], [], []
    batch, backward = FastEngine._batch, rehearsal.forward_and_backward

    def watched(trainer, row):
        moments.append(rehearsal.bytes_to_come(trainer))
        backward(trainer, row)
        assert all(p.grad is None for p in trainer.model.parameters())
        rows.append(row)
        made.append("row")

    def counted(self, *shape):
        made.append(shape[:2])
        return batch(self, *shape)

    monkeypatch.setattr(FastEngine, "_batch", counted)
    monkeypatch.setattr(rehearsal, "forward_and_backward", watched)
    rehearsed = run(folder, tmp_path / "rehearsed", *more, "--rehearse", "true")
    data, encoder = rehearsed.train_dataset, rehearsed.encoder
    lengths = [len(encoder.encode(data, i, rehearsal.EVAL_TEMPLATE).input_ids) for i in rehearsed.train_rows]
    assert rehearsed.longest["train"] in [i for i, n in enumerate(lengths) if n == max(lengths)]
    # 4 prompts x 4 completions, 3 validation prompts, then a row of 2 prompts with 4 x 8 tokens each
    assert made[:3] == [(16, max(lengths)), (3, made[1][1]), "row"] and made.count("row") == 1
    assert rows[0].input_ids.numel() == 2 * (max(lengths) + 4 * 7) and rows[0].targets.numel() == 2 * 4 * 8
    assert f"a row of {rows[0].input_ids.numel()} tokens, the longest there are" in capsys.readouterr().out
    # room is taken for the moments that the first step makes, and no longer once they are there
    assert moments == [8 * sum(p.numel() for p in rehearsed.model.parameters())]
    assert rehearsal.bytes_to_come(rehearsed) == 0

    a, b = tmp_path / "plain", tmp_path / "rehearsed"
    assert without_times(lines(a / "logs.jsonl")) == without_times(lines(b / "logs.jsonl"))
    assert lines(a / "rollouts.jsonl") == lines(b / "rollouts.jsonl")
    for (name, p), (_, q) in zip(master_weights(plain.model), master_weights(rehearsed.model), strict=True):
        assert torch.equal(p, q), name
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        states = [torch.load(root / "checkpoint-2" / name, weights_only=False) for root in (a, b)]
        assert same(*states), name


def test_no_room_for_the_longest_row_ends_it_before_the_first_update(folder, tmp_path, monkeypatch):  # noqa: F811
    def refuse(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(rehearsal, "forward_and_backward", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        run(folder, tmp_path / "out", "--max_steps", 1, "--rehearse", "true")
    assert not (tmp_path / "out/logs.jsonl").exists()
