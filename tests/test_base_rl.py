"""What DAPO and several updates a rollout need besides the loss: lengths, old log-probs, top_p."""

import pytest
import torch
from trl.rewards import get_soft_overlong_punishment

from open_r1.arguments import GRPOArguments
from open_r1.data_loader import refill_rows, rollout_rows
from open_r1.grpo import soft_overlong_reward
from open_r1.packing import pack
from open_r1.rollout import FastEngine
from open_r1.sampling import Sampling, sampling_keys
from open_r1.scoring import add_scoring_forward
from open_r1.trainer import Qwen2VLGRPOTrainer
from tests.prompts import make_prompts
from tests.test_grpo import folder, lines, run  # noqa: F401
from tests.tiny import tiny_model, tiny_processor


@pytest.mark.parametrize("cap, cache", [(256, 51), (10, 10), (8, 1), (20, None)])
def test_soft_overlong_punishment_is_trls(cap, cache):
    ids = [[1] * length for length in range(1, cap + 1)]
    got = soft_overlong_reward([], completion_ids=ids, max_completion_length=[cap] * cap, cache=cache)
    assert got == pytest.approx(get_soft_overlong_punishment(cap, cache or cap // 5)(ids))
    assert got[-1] == -1 and got[0] == (0 if cap > (cache or 0) else pytest.approx(-1 / cap))


def test_soft_overlong_by_hand_and_refused():
    ids = [[1] * n for n in (5, 6, 8, 10)]
    assert soft_overlong_reward([], ids, [10] * 4, cache=4) == [0, 0, -0.5, -1]
    with pytest.raises(ValueError, match="cache=11: set 1 up to --max_completion_length, 10"):
        soft_overlong_reward([], ids, [10] * 4, cache=11)


def test_soft_overlong_in_a_run(folder, tmp_path):  # noqa: F811
    """At a cap of 8 with a cache of 4, minus a quarter for each token beyond four."""
    trainer = run(
        folder, tmp_path / "out", "--max_steps", 1, "--save_strategy", "no",
        "--reward_funcs", "soft_overlong", "--reward_weights", 1, "--reward_options", "soft_overlong.cache=4",
    )  # fmt: skip
    (log,) = [log for log in lines(tmp_path / "out/logs.jsonl") if "loss" in log]
    for sample in lines(tmp_path / "out/rollouts.jsonl"):
        assert sample["rewards"]["soft_overlong"] == min(0, (4 - sample["tokens"]) / 4)
    assert -1 <= log["reward"] < 0 and trainer.args.max_completion_length == 8
    with pytest.raises(ValueError, match="cache=9: set 1 up to --max_completion_length, 8"):
        run(
            folder, tmp_path / "dry", "--max_steps", 1, "--dry_run", "true",
            "--reward_funcs", "soft_overlong", "--reward_weights", 1,
            "--reward_options", "soft_overlong.cache=9",
        )  # fmt: skip


def test_three_updates_of_one_rollout(folder, tmp_path, monkeypatch):  # noqa: F811
    """6 prompts are rolled out at once and make three updates of 2: the data set's rows in their order. The
    old log-probs of all are those of the policy that sampled, and only the first update is on-policy."""
    rolled_out, rows, ratios = [], [], []
    roll_out, compute_loss = Qwen2VLGRPOTrainer.roll_out, Qwen2VLGRPOTrainer.compute_loss

    def watched(self, number, prompts):
        rolled_out.append([prompt.row for prompt in prompts])
        return roll_out(self, number, prompts)

    def loss(self, model, row, **kwargs):
        with torch.no_grad():
            now = model(**row.packed.model_inputs())
        rows.append(row)
        ratios.append(float((now - row.old_logps).abs().max()))
        return compute_loss(self, model, row, **kwargs)

    monkeypatch.setattr(Qwen2VLGRPOTrainer, "roll_out", watched)
    monkeypatch.setattr(Qwen2VLGRPOTrainer, "compute_loss", loss)
    run(
        folder, tmp_path / "out", "--max_steps", 6, "--save_strategy", "no", "--steps_per_generation", 6,
        "--learning_rate", 0.01, "--optim", "sgd", "--epsilon", 0.2, "--epsilon_high", 0.28,
    )  # fmt: skip
    assert len(rolled_out) == 2 and len(rows) == 12  # two rows an update
    assert [row.numbers[0] for row in rows] == [*rolled_out[0], *rolled_out[1]]
    assert all((row.old_logps - row.rollout_logps).abs().max() < 1e-4 for row in rows)
    on_policy = [ratio < 1e-4 for ratio in ratios]
    assert on_policy == ([True] * 2 + [False] * 4) * 2


@pytest.mark.parametrize("engine_top_p", [1.0, 0.5])
def test_old_log_probs_are_of_the_full_softmax(engine_top_p):
    """Under top_p too: sampling leaves the tail out, and the log-probs are still the policy's own, so that
    ratios begin at 1. Renormalised ones would be higher at almost every token."""
    prompts, sampling = make_prompts()[:2], Sampling(False, 12, top_p=engine_top_p)
    keys = sampling_keys(1, 0, [0, 1], 4)
    groups = FastEngine(tiny_model(), tiny_processor()).generate(prompts, 4, sampling, keys)
    policy = add_scoring_forward(tiny_model())
    row = pack([(p, [c.token_ids for c in group]) for p, group in zip(prompts, groups, strict=True)])
    with torch.no_grad():
        logps, entropy = (policy(**row.model_inputs(), statistic=s) for s in (None, "entropy"))
    assert torch.allclose(torch.cat([c.logps for group in groups for c in group]), logps, atol=1e-4)
    assert (-logps.mean() < 0.8 * entropy.mean()) == (engine_top_p < 1)  # the tail is not sampled


def test_a_rollout_with_top_p_starts_at_ratio_1(folder, tmp_path):  # noqa: F811
    run(
        folder, tmp_path / "out", "--max_steps", 2, "--save_strategy", "no", "--steps_per_generation", 4,
        "--top_p", 0.6, "--temperature", 0.9,
    )  # fmt: skip
    logs = [log for log in lines(tmp_path / "out/logs.jsonl") if "loss" in log]
    assert logs[0]["logps_gap"] < 1e-4 and logs[0]["clip_share"] == 0


# --- dynamic sampling ---------------------------------------------------------------------------------------

STUCK = ("--reward_funcs", "tests.rewards.half_stuck", "--reward_weights", 1, "--save_strategy", "no")


def drawn_in(out) -> list[tuple]:
    """(rollout, row, true count, worst text) of each group that was trained on, in order."""
    samples = lines(out / "rollouts.jsonl")
    return [(s["rollout"], s["row"], s["answer"], s["text"]) for s in samples if s["which"] == "worst"]


def test_groups_of_equal_rewards_are_replaced(folder, tmp_path):  # noqa: F811
    """Even counts are stuck: half the prompts and more. After enough tries none is left; live prompts stay in
    their places, with their completions; new ones are none of the rollout's own."""
    more = (*STUCK, "--max_steps", 3, "--gradient_accumulation_steps", 4)
    run(folder, tmp_path / "plain", *more)
    run(folder, tmp_path / "dynamic", *more, "--dynamic_sampling", 8)
    before, after = drawn_in(tmp_path / "plain"), drawn_in(tmp_path / "dynamic")
    assert len(before) == len(after) == 12
    own = {rollout: {row for r, row, *_ in before if r == rollout} for rollout in range(3)}
    replaced = 0
    for was, now in zip(before[:4], after[:4], strict=True):  # the first update: weights are the same
        if was[2] % 2:
            assert now == was
        else:
            replaced += 1
            assert now[2] % 2 and now[1] not in own[0]
    assert replaced and len({row for _, row, *_ in after[:4]}) == 4
    logs = [log for log in lines(tmp_path / "dynamic/logs.jsonl") if "loss" in log]
    plain = [log for log in lines(tmp_path / "plain/logs.jsonl") if "loss" in log]
    assert [log["zero_variance"] for log in logs] == [0, 0, 0]
    assert logs[0]["dynamic_sampling/first_zero_variance"] == plain[0]["zero_variance"] > 0
    assert all(1 <= log["dynamic_sampling/tries"] <= 8 for log in logs)
    assert logs[0]["dynamic_sampling/first_reward"] == plain[0]["reward"] != logs[0]["reward"]
    assert not any(name.startswith("dynamic_sampling") for name in plain[0])


def test_tries_are_limited_and_a_resumed_run_makes_the_same(folder, tmp_path):  # noqa: F811
    """With one try some groups stay as they are. The second half of a run that was cut is the whole one's."""
    more = (*STUCK, "--gradient_accumulation_steps", 4, "--dynamic_sampling", 1)
    more += ("--save_strategy", "steps", "--save_steps", 2)
    run(folder, tmp_path / "whole", *more, "--max_steps", 4)
    run(folder, tmp_path / "parts", *more, "--max_steps", 2)
    run(folder, tmp_path / "parts", *more, "--max_steps", 4)
    assert drawn_in(tmp_path / "parts") == drawn_in(tmp_path / "whole")
    logs = [log for log in lines(tmp_path / "whole/logs.jsonl") if "loss" in log]
    assert {log["dynamic_sampling/tries"] for log in logs} <= {0, 1}
    assert any(log["zero_variance"] for log in logs)


def arguments(**more) -> GRPOArguments:
    return GRPOArguments(output_dir="out", use_cpu=True, report_to="none", eval_strategy="no", seed=3, **more)


def test_rows_to_refill_with_are_new_and_wander_through_all():
    args = arguments(gradient_accumulation_steps=8)
    own = rollout_rows(args, 30, 1)
    tries = [refill_rows(args, 30, 1, attempt) for attempt in (1, 2, 3)]
    assert not set(own) & {row for one in tries for row in one}
    assert len({*tries[0], *tries[1], *tries[2][:6]}) == 22  # all others, each once, before one comes again
    assert tries[0] == refill_rows(args, 30, 1, 1) != refill_rows(args, 30, 2, 1)
    assert all(0 <= row < 8 for row in refill_rows(args, 8, 0, 5))  # no more rows than a rollout has
