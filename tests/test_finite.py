"""What is not finite, loss, gradient or reward, stops the run before weights change, or drops the update."""

import re
from types import SimpleNamespace

import pytest
import torch

from open_r1 import grpo
from open_r1 import trainer as module
from open_r1.checkpoint import load_policy
from open_r1.complete import complete_marker
from open_r1.control import RunControl, StopRun
from open_r1.finite import FiniteWatch
from open_r1.grpo import reward_funcs_registry
from tests.test_grpo import folder, lines, run  # noqa: F401 (a fixture)

NAN = float("nan")


def spoil(monkeypatch, what: str, updates: set[int]) -> None:
    """`what` of these updates is not finite; an update has two rows."""
    if what == "loss":
        original, calls = module.grpo_loss, []

        def loss(*args):
            calls.append(1)
            value, sums = original(*args)  # of an update's first row
            return (value * NAN if len(calls) in {2 * update - 1 for update in updates} else value), sums

        monkeypatch.setattr(module, "grpo_loss", loss)
    elif what == "gradient":  # a finite loss can have one that is not
        init = grpo.Qwen2VLGRPOTrainer.__init__

        def poisoned(self, *args, **kwargs):
            init(self, *args, **kwargs)
            next(self.model.parameters()).register_hook(
                lambda gradient: gradient * NAN if self.state.global_step + 1 in updates else gradient
            )

        monkeypatch.setattr(grpo.Qwen2VLGRPOTrainer, "__init__", poisoned)
    else:  # finite by itself, and no longer times its weight; the first two calls are the preflight's
        calls = []

        def huge(completions, **kwargs):
            calls.append(1)
            return [3e38 if len(calls) - 2 in updates else 0.1 * i for i in range(len(completions))]

        monkeypatch.setitem(reward_funcs_registry, "huge", huge)


def rewards_of(what: str) -> tuple:
    return ("--reward_funcs", "huge", "accuracy", "--reward_weights", 10, 0) if what == "rewards" else ()


def weights(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("what", ["loss", "gradient", "rewards"])
def test_the_run_stops_before_weights_change(what, folder, tmp_path, monkeypatch):  # noqa: F811
    """The checkpoint holds the last good update; the message names update, data set rows and rewards."""
    spoil(monkeypatch, what, {2})
    with pytest.raises(StopRun) as stop:
        run(folder, tmp_path, "--max_steps", 3, "--shuffle_dataset", "false", *rewards_of(what))
    assert stop.value.code == 65
    pattern = f"The {what} of update 2 (is|are) not finite; data set rows \\(rewards\\) of rank 0: (.*)\\. No"
    named = re.findall(r"(\d+) \(([^)]*)\)", re.search(pattern, str(stop.value))[2])
    assert [int(row) for row, _ in named] == ([2] if what == "loss" else [2, 3])
    assert all(len(rewards.split()) == 4 for _, rewards in named)
    assert ("inf" in str(stop.value)) == (what == "rewards")
    assert complete_marker(tmp_path / "checkpoint-1")
    for name, parameter in load_policy(tmp_path / "checkpoint-1", torch.float32).named_parameters():
        assert torch.isfinite(parameter).all(), name


@pytest.mark.parametrize("what", ["loss", "gradient", "rewards"])
def test_such_an_update_is_dropped_where_asked(what, folder, tmp_path, monkeypatch, capsys):  # noqa: F811
    spoil(monkeypatch, what, {2, 3})
    more = ("--on_nonfinite", "skip", "--max_nonfinite", 2, "--save_strategy", "no", *rewards_of(what))
    held = []
    original = grpo.Qwen2VLGRPOTrainer.roll_out

    def roll_out(self, *args):
        held.append(weights(self.model))
        return original(self, *args)

    monkeypatch.setattr(grpo.Qwen2VLGRPOTrainer, "roll_out", roll_out)
    trainer = run(folder, tmp_path, "--max_steps", 4, *more)
    held.append(weights(trainer.model))

    def moved(update: int) -> bool:
        return any(not torch.equal(held[update - 1][name], held[update][name]) for name in held[0])

    assert [moved(update) for update in (1, 2, 3, 4)] == [True, False, False, True]
    logs = [log for log in lines(tmp_path / "logs.jsonl") if "reward" in log]
    assert [log["dropped_updates"] for log in logs] == [0, 1, 2, 2]
    assert logs[3]["loss"] is not None and logs[1]["grad_norm"] is None
    assert capsys.readouterr().out.count("This update is dropped.") == 2


def test_at_most_so_many_in_a_row_are_dropped(folder, tmp_path, monkeypatch, capsys):  # noqa: F811
    """Counted over a resume. A reward that has failed is, too."""

    calls = []  # two of them are the preflight's, in each session

    def sometimes(completions, **kwargs):
        calls.append(1)
        return [] if len(calls) in (3, 9) else [0.1 * i for i in range(len(completions))]

    monkeypatch.setitem(reward_funcs_registry, "sometimes", sometimes)
    more = ("--on_nonfinite", "skip", "--max_nonfinite", 2, "--save_steps", 1)
    more += ("--reward_funcs", "sometimes", "--reward_weights", 1)
    with monkeypatch.context() as patch:
        spoil(patch, "loss", {1, 3, 4})
        run(folder, tmp_path, "--max_steps", 4, *more)
    spoil(monkeypatch, "loss", {1})
    with pytest.raises(StopRun, match="of update 5 is not finite.* 3 updates in a row were not"):
        run(folder, tmp_path, "--max_steps", 9, *more)
    assert "reward sometimes has failed 2 times" in capsys.readouterr().out


def test_an_update_that_stops_the_run_is_not_counted():
    """It is in no checkpoint, and is made again."""
    watch = FiniteWatch(SimpleNamespace(on_nonfinite="skip", max_nonfinite=1, process_index=0), RunControl())
    assert watch.settle(1, False)
    before = watch.state()
    with pytest.raises(StopRun, match="update 2 is not finite.* 2 updates in a row"):
        watch.settle(2, False)
    assert watch.state() == before == {"in_a_row": 1, "dropped": 1}
