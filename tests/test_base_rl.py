"""What DAPO and several updates a rollout need besides the loss: lengths, old log-probs, top_p."""

import pytest
import torch
from trl.rewards import get_soft_overlong_punishment

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
