"""What is watched of a policy, by hand-worked numbers; and a run that falls after a peak ends, and leaves the
peak."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from open_r1 import collapse_watch, grpo, keep_best, kl_readout, metrics, probe, rolling_out, validation
from open_r1.arguments import GRPOArguments
from open_r1.checkpoint import load_policy
from open_r1.collapse_watch import CollapseWatch, difference_error
from open_r1.control import StopRun
from open_r1.kl_readout import LARGEST, token_numbers
from open_r1.probe import BlankImages
from open_r1.rollout import Completion
from open_r1.sampling import Sampling
from open_r1.submission import read_record
from tests.prompts import make_prompts
from tests.test_control import status
from tests.test_grpo import folder, give_scores, lines, run, without_times  # noqa: F401 (folder is a fixture)

# --- the numbers --------------------------------------------------------------------------------------------


def test_numbers_of_completions():
    texts = {  # text: malformed
        "<answer>3</answer>": 0, "<answer>4</answer": 1, "answer>4</answer>": 1, "\\boxed}": 1, "three": 0,
    }  # fmt: skip
    group = [Completion(torch.arange(9) % 3, torch.zeros(9), False, text) for text in texts]
    (prompt, *_) = make_prompts()
    numbers = dict(
        zip(metrics.COMPLETION_NUMBERS, metrics.completion_numbers([prompt], [group]).T.tolist(), strict=True)
    )
    assert numbers["malformed"] == list(texts.values()) and numbers["answer"] == [3, -1, -1, -1, -1]
    assert numbers["distinct_4"] == [0.5] * 5  # 0120 1201 2012 of six
    assert [metrics.distinct_4(ids) for ids in ([], [1, 1, 1, 1], [1] * 10)] == [
        1.0,
        1.0,
        pytest.approx(1 / 7),
    ]


def test_answers_and_truth():
    answers = torch.tensor([[3.0, 3, 4, -1], [5, -1, -1, -1]])
    numbers = metrics.answer_numbers(answers)
    assert numbers["completions/answer_entropy"] == pytest.approx(0.5 * math.log(2) + 2 * 0.25 * math.log(4))
    assert numbers["completions/answers_a_group"] == 1.5
    assert metrics.answer_numbers(-torch.ones(2, 3))["completions/answer_entropy"] == 0
    # Within groups: a reward that differs between groups alone tells nothing.
    rewards, correct = (
        torch.tensor([[1.0, 1, 0, 0], [9, 9, 9, 9]]),
        torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0]]),
    )
    expected = 0.5 / math.sqrt(1.0 * 0.75)
    assert metrics.truth_correlation(rewards, correct)["reward_truth_correlation"] == pytest.approx(expected)
    rewards[0, 0] = torch.nan  # could not be judged
    assert metrics.truth_correlation(rewards, correct) == {}
    assert metrics.means([{"a": 1.0, "b": 2.0}, {"a": 2.0}]) == {"a": 1.5, "b": 2.0}


# --- the rule -----------------------------------------------------------------------------------------------

FINE = {
    "completions/parsed": 0.9, "completions/distinct_4": 0.8, "completions/answer_entropy": 2.0,
    "completions/mean_length": 40.0, "reward": 0.0,
}  # fmt: skip
BAD = {
    "completions/parsed": 0.71,
    "completions/distinct_4": 0.39,
    "completions/answer_entropy": 0.99,
}


def watch_of(*rollouts: dict) -> CollapseWatch:
    watch = CollapseWatch()
    for number, logs in enumerate(rollouts):
        watch.add_rollout(number, FINE | logs)
    return watch


@pytest.mark.parametrize("name", BAD)
def test_a_sign_in_three_windows_ends_a_run(name):
    bad = {name: BAD[name], "reward": 0.1}
    assert watch_of(*[{}] * 4, *[bad] * 4).sign() is None  # the first of the three windows is not full yet
    assert f"{BAD[name]:.3f}, below" in watch_of(*[{}] * 4, *[bad] * 5).sign()
    assert watch_of(*[{}] * 4, *[bad] * 3, {}, bad, bad, {}).sign() is None


def test_what_is_no_sign():
    few = {"completions/answer_entropy": 0.5, "reward": -0.1}  # the reward falls with it: other questions
    assert watch_of(*[{}] * 4, *[few] * 9).sign() is None
    short = watch_of(*[{}] * 3, *[{"completions/mean_length": 8.0}] * 9)
    assert short.sign() is None
    assert short.add_rollout(12, FINE | {"completions/mean_length": 20.0}) == {
        "completions/length_vs_start": 0.5
    }
    assert watch_of(*[{"completions/parsed": 0.0}] * 12).sign() is None  # nothing there to be lost


def test_the_score_must_fall_twice():
    error = difference_error([500, 500])
    assert error == pytest.approx(math.sqrt(2) * math.hypot(2.236, 2.236) / 2, rel=1e-3)
    for scores, told in (
        ((50, 60, 50, 50), "50.00, after a best of 60.00"),
        ((50, 60, 50, 58), None),
        ((50, 40), None),
        ((50, 40, 40), "of 50.00"),
    ):
        watch = CollapseWatch()
        for update, score in enumerate(scores):
            watch.add_score(update, score, error)
        assert watch.sign() is told or told in watch.sign()


def test_what_is_made_again_takes_its_own_place():
    """A stop between a rollout and its updates, and a resume."""
    rollouts = [{"reward": float(i)} for i in range(12)]
    whole, parts = watch_of(*rollouts), watch_of(*rollouts[:10])
    again = CollapseWatch()
    again.restore(json.loads(json.dumps(parts.state())))
    for number in range(8, 12):
        again.add_rollout(number, FINE | rollouts[number])
    assert again.state() == whole.state()


# --- runs ---------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def short_validations(monkeypatch):
    monkeypatch.setattr(validation, "GREEDY", Sampling(greedy=True, max_new_tokens=8))


def test_the_peak_stays_when_the_policy_falls_apart(folder, tmp_path, monkeypatch):  # noqa: F811
    """It is taught to repeat itself; its score rises, then falls. The same command says the same again, and
    goes on without the watch."""
    masters = []

    def repetition(completion_ids, **kwargs):
        return [-metrics.distinct_4(ids) for ids in completion_ids]

    def keep(base, submission, tensors, record):
        tensors = [(name, tensor.clone()) for name, tensor in tensors]
        masters.append(dict(tensors))
        return write(base, submission, tensors, record)

    write = keep_best.write_submission
    monkeypatch.setattr(keep_best, "write_submission", keep)
    monkeypatch.setitem(grpo.reward_funcs_registry, "repetition", repetition)
    monkeypatch.setattr(collapse_watch, "ERRORS", 100.0)  # the invented scores are not to end it
    scores = [10.0, 20.0, 40.0] + [30.0] * 9
    give_scores(monkeypatch, *scores)
    more = (
        "--reward_funcs", "repetition", "--reward_weights", 1, "--learning_rate", 1e-2,
        "--val_dataset", folder / "val",
        "--eval_strategy", "steps", "--eval_steps", 4, "--submission_dir", tmp_path / "best",
        "--max_completion_length", 24, "--num_generations", 8, "--collapse_watch", "true",
        "--save_steps", 100,
    )  # fmt: skip
    for _ in range(2):
        with pytest.raises(StopRun, match="--collapse_watch: the share of different 4-grams is 0") as stop:
            run(folder, tmp_path / "out", *more, "--max_steps", 40)
        told = status(tmp_path / "out")
        assert (stop.value.code, told["cause"], told["exit_code"]) == (0, "collapse", 0)
    last = lines(tmp_path / "out/logs.jsonl")[-1]
    assert 12 < last["step"] < 40 and last["completions/distinct_4"] < 0.5
    assert read_record(tmp_path / "best")["step"] == 8 and len(masters) == 2
    for name, parameter in load_policy(tmp_path / "best", torch.bfloat16).named_parameters():
        assert torch.equal(parameter, masters[1][name].bfloat16()), name


def test_the_readouts_change_nothing(folder, tmp_path, monkeypatch):  # noqa: F811
    """Each in the line of its own rollout; with them off the run is the same to the bit. The rollout copy has
    the policy again right after."""

    def then_compare(trainer, *args):
        logs = kl_readout.kl_to_base(trainer, *args)
        pairs = zip(trainer.engine.model.parameters(), trainer.model.parameters(), strict=True)
        assert all(torch.equal(copy, own) for copy, own in pairs)
        return logs

    monkeypatch.setattr(rolling_out, "kl_to_base", then_compare)
    plain = run(folder, tmp_path / "plain", "--max_steps", 4, "--save_strategy", "no")
    more = ("--kl_readout_steps", 2, "--probe_steps", 2, "--probe_rows", 2, "--val_dataset", folder / "val")
    read = run(folder, tmp_path / "read", "--max_steps", 4, "--save_strategy", "no", *more)
    logs = without_times(lines(tmp_path / "read/logs.jsonl"))
    assert ["kl_to_base" in log and "probe/image_gap" in log for log in logs] == [True, False] * 2
    assert logs[0]["kl_to_base"] == logs[0]["kl_to_base/k1"] == 0 < logs[2]["kl_to_base"]
    own = [{k: v for k, v in log.items() if not k.startswith(("kl_to", "probe/"))} for log in logs]
    assert own == without_times(lines(tmp_path / "plain/logs.jsonl"))
    for (name, a), (_, b) in zip(plain.model.named_parameters(), read.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_kl_worked_by_hand():
    policy, base = torch.tensor([-0.5, -1.0, -0.1]), torch.tensor([-0.5, -3.0, -9.0])
    k3, k1, far = token_numbers(policy, base).tolist()
    assert k3 == pytest.approx([0, math.exp(-2) + 1, math.exp(-8.9) + 7.9])
    assert k1 == pytest.approx([0, 2, 8.9]) and far == [0, 1, 1]
    assert token_numbers(base, policy)[0].tolist() == pytest.approx([0, math.exp(2) - 3, LARGEST])


def test_a_blank_picture_has_the_size_of_the_picture():
    prompts = make_prompts()

    class Encoder:
        def encode(self, data, row, template):
            return prompts[row]

    for row, prompt in enumerate(prompts):
        blank = BlankImages(Encoder()).encode(None, row, "")
        assert (
            torch.equal(blank.input_ids, prompt.input_ids) and blank.image_grid_thw is prompt.image_grid_thw
        )
        if prompt.pixel_values is not None:
            assert blank.pixel_values.shape == prompt.pixel_values.shape and not blank.pixel_values.any()
            assert prompt.pixel_values.any()


def test_a_probe_looks_at_rows_that_are_validated_on(monkeypatch):
    """Those that report, under --selection_rows, are none of its business."""
    looked_at = []
    monkeypatch.setattr(probe.validation, "evaluate", lambda *_, rows, **more: looked_at.append(rows))
    for name in ("gather_examples", "summarize"):
        monkeypatch.setattr(probe.validation, name, lambda examples: examples)
    monkeypatch.setattr(probe.validation, "score", lambda summaries: 50.0)
    args = GRPOArguments(output_dir="out", use_cpu=True, report_to="none", eval_strategy="no", probe_rows=2)
    trainer = SimpleNamespace(
        args=args, eval_encoder=None, engine=None, validation_sets={"val": range(9)},
        validation_rows={"val": [2, 3, 5, 7]},
    )  # fmt: skip
    assert probe.image_probe(trainer)["probe/image_gap"] == 0
    assert looked_at == [[2, 5]] * 2
