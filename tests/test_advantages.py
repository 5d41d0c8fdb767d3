"""Advantages, token weights and the clipped objective against hand-worked numbers."""

import math

import pytest
import torch

from open_r1.advantages import LossSettings, combine_rewards, group_advantages, grpo_loss, token_weights

NAN = math.nan


def test_combine_leaves_out_what_could_not_judge():
    values = torch.tensor([[[1.0, 0.5], [0.0, NAN], [NAN, NAN]]])  # [1 prompt, 3 completions, 2 functions]
    got = combine_rewards(values, torch.tensor([1.0, 0.2]))
    assert got[0, :2].tolist() == pytest.approx([1.1, 0.0]) and got[0, 2].isnan()


def test_weight_0_judges_nothing():
    got = combine_rewards(torch.tensor([[[NAN, 0.0], [1.0, NAN]]]), torch.tensor([1.0, 0.0]))
    assert got[0, 0].isnan() and got[0, 1] == 1


def test_group_scale():
    got = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), "group")
    deviation = 0.5  # unbiased, of one 1 and three 0
    assert got[0].tolist() == pytest.approx([0.75 / (deviation + 1e-4)] + 3 * [-0.25 / (deviation + 1e-4)])


def test_batch_scale_is_one_deviation_for_all_groups():
    rewards = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    got = group_advantages(rewards, "batch")
    assert got.flatten().tolist() == pytest.approx([0.5 / (0.5 + 1e-4), -0.5 / (0.5 + 1e-4), 0, 0])


def test_equal_rewards_and_unknown_rewards_give_zero():
    rewards = torch.tensor([[1.0, 1.0, 1.0], [NAN, NAN, NAN], [1.0, 0.0, NAN], [1.0, NAN, NAN]])
    got = group_advantages(rewards, "group")
    assert not got[0].any() and not got[1].any() and not got[3].any()
    assert got[2, 2] == 0 and got[2, 0] == -got[2, 1] == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-4))
    assert group_advantages(rewards, "none")[2].tolist() == [0.5, -0.5, 0.0]


def test_token_weights_by_hand():
    lengths, truncated = torch.tensor([2, 4]), torch.tensor([False, True])

    def weights(loss_type, mask=False, tokens=6):
        return token_weights(lengths, truncated, loss_type, 10, mask, 2, tokens).tolist()

    assert weights("grpo") == pytest.approx([1 / 4, 1 / 8])
    assert weights("dapo") == pytest.approx([1 / 6, 1 / 6])
    assert weights("dr_grpo") == pytest.approx([1 / 20, 1 / 20])
    # A masked completion still counts in the mean, but its tokens are no tokens.
    assert weights("grpo", mask=True) == pytest.approx([1 / 4, 0])
    assert weights("dapo", mask=True, tokens=2) == pytest.approx([1 / 2, 0])


def test_clipping_by_hand():
    """Ratios 1.5 and 0.5 with both signs: the pessimistic side is clipped, and has no gradient."""
    old = torch.zeros(4)
    logps = torch.tensor([1.5, 1.5, 0.5, 0.5]).log().requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss, sums = grpo_loss(
        logps, old, None, advantages, torch.full((4,), 0.25), torch.arange(4), LossSettings(0.2, 0.28)
    )
    assert loss.item() == pytest.approx(-(1.28 - 1.5 + 0.5 - 0.8) / 4)
    loss.backward()
    assert logps.grad.tolist() == pytest.approx([0, 1.5 / 4, -0.5 / 4, 0])
    assert sums["clipped"] == 2 and sums["tokens"] == 4


def test_on_policy_the_ratio_is_one_and_only_its_gradient_acts():
    logps = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, _ = grpo_loss(
        logps, None, None, torch.tensor([1.0, -1.0]), torch.tensor([0.5, 0.5]), torch.arange(2),
        LossSettings(),
    )  # fmt: skip
    assert loss.item() == 0
    loss.backward()
    assert logps.grad.tolist() == [-0.5, 0.5]


@pytest.mark.parametrize("correction", [False, True])
def test_k3(correction):
    logps, ref = torch.tensor([-1.0], requires_grad=True), torch.tensor([-1.5])
    settings = LossSettings(beta=0.1, use_bias_correction_kl=correction)
    owners = torch.zeros(1, dtype=torch.long)
    loss, sums = grpo_loss(logps, None, ref, torch.zeros(1), torch.ones(1), owners, settings)
    k3 = math.exp(-0.5) + 0.5 - 1
    assert loss.item() == pytest.approx(0.1 * k3) and sums["kl"].item() == pytest.approx(k3)
    loss.backward()
    gradient = 1 - math.exp(-0.5) + (k3 if correction else 0)  # the ratio's gradient is the ratio
    assert logps.grad.item() == pytest.approx(0.1 * gradient)


@pytest.mark.parametrize("value", [0.1, 1.1, 0.7])
def test_a_group_of_equal_rewards_has_advantages_of_exactly_zero(value):
    """In float32 the mean of eight times 0.1 is not 0.1; such a group would be trained on rounding errors."""
    rewards = torch.full((1, 8), value)
    assert not group_advantages(rewards, "group").any() and not group_advantages(rewards, "batch").any()
    rewards[0, 3] = NAN
    assert not group_advantages(rewards, "group").any()


def test_sequence_ratios_by_hand():
    """GSPO: a completion's ratio is the geometric mean of its tokens', clipped as one, and every token of it
    gets an equal share of the gradient."""
    owners = torch.tensor([0, 0, 1, 1, 1, 2])
    logps = torch.tensor([4.0, 1.0, 0.5, 2.0, 1.0, 1.5]).log().requires_grad_()  # ratios: 2, 1 and 1.5
    advantages = torch.tensor([-1.0, -1.0, 2.0, 2.0, 2.0, 1.0])
    weights = torch.tensor([1 / 6] * 2 + [1 / 9] * 3 + [1 / 3])  # means over completions of token means
    settings = LossSettings(0.2, 0.28, importance_sampling_level="sequence")
    loss, sums = grpo_loss(logps, torch.zeros(6), None, advantages, weights, owners, settings)
    assert loss.item() == pytest.approx(-(-2.0 + 2.0 * 1.0 + 1.28) / 3)
    loss.backward()
    assert logps.grad.tolist() == pytest.approx([2 / 6, 2 / 6, -2 / 9, -2 / 9, -2 / 9, 0])
    assert sums["clipped"] == 1


def test_dapo_by_hand():
    """Equation 8 of DAPO: the sum over the tokens of all completions by their number, clipped to 0.8 and
    1.28; not a mean of the completions' means."""
    lengths, owners = torch.tensor([1, 3]), torch.tensor([0, 1, 1, 1])
    weights = token_weights(lengths, torch.tensor([False] * 2), "dapo", 10, False, 2, 4)[owners]
    ratios, advantages = torch.tensor([1.4, 0.7, 1.1, 1.4]), torch.tensor([1.0, -1.0, -1.0, -1.0])
    loss, _ = grpo_loss(
        ratios.log(), torch.zeros(4), None, advantages, weights, owners, LossSettings(0.2, 0.28)
    )
    assert loss.item() == pytest.approx(-(1.28 - 0.8 - 1.1 - 1.4) / 4)
