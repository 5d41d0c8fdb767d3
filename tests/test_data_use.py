"""Which rows are drawn and which groups are kept: weights, frequencies, resume, any number of ranks."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from open_r1 import row_sampler
from open_r1.check_args import check_args
from open_r1.data_loader import prompt_places, refill_rows, rollout_rows
from open_r1.grpo import close_reward
from open_r1.informative import kept_groups, most_informative, share_out
from open_r1.label_free import negative_entropy_reward
from open_r1.reward_checks import unused_flags
from open_r1.rewards import Reward, as_conversations
from open_r1.row_sampler import FLOOR, MEMORY, PRIOR, RowSampler, count_weights
from tests.test_base_rl import arguments, drawn_in
from tests.test_grpo import FLAGS, folder, lines, parse, run, without_times  # noqa: F401

COUNTS = [1] * 60 + [2] * 30 + [7] * 10  # of 100 rows


class Texts:
    """Quacks like CountingData for a sampler: every third row asks something else."""

    question_column, solution_column = "problem", "solution"

    def column(self, name, rows):
        return [str(COUNTS[row]) if name == "solution" else str(row % 3 == 0) for row in rows]


def sampler(**more) -> RowSampler:
    return RowSampler(arguments(gradient_accumulation_steps=4, **more), Texts(), range(len(COUNTS)))


def shares_drawn(one: RowSampler, rollouts: int) -> np.ndarray:
    """How often each row is drawn, as a share of all that are."""
    drawn = np.bincount([row for n in range(rollouts) for row in one.rows(n)], minlength=len(COUNTS))
    return drawn / drawn.sum()


# --- rows ---------------------------------------------------------------------------------------------------


def test_without_weights_the_order_is_what_it_was():
    plain = sampler()
    assert plain.rows(3) == rollout_rows(plain.args, 100, 3)
    assert plain.refill(3, 2) == refill_rows(plain.args, 100, 3, 2)
    assert plain.state() == {}


@pytest.mark.parametrize("alpha, expected", [(1.0, [1 / 3, 1 / 3, 1 / 3]), (0.5, [0.444, 0.314, 0.181])])
def test_true_counts_are_drawn_as_often_as_asked(alpha, expected):
    """Frequency ** (1 - alpha), over its sum; within 4 standard errors of 8,000 draws."""
    expected = np.array(expected) / sum(expected)
    shares = shares_drawn(sampler(count_balance=alpha), 2000)
    got = np.array([shares[np.array(COUNTS) == count].sum() for count in (1, 2, 7)])
    if alpha == 0.5:
        assert expected == pytest.approx(np.sqrt([60, 30, 10]) / np.sqrt([60, 30, 10]).sum(), abs=0.02)
        expected = np.sqrt([60, 30, 10]) / np.sqrt([60, 30, 10]).sum()
    assert np.abs(got - expected).max() < 0.022  # 4 x sqrt(1/3 x 2/3 / 8000)
    of_one_count = shares[np.array(COUNTS) == 7]
    assert of_one_count.min() > 0.5 * of_one_count.max()  # rows of a count are equals


def test_a_rare_count_is_not_drawn_without_end():
    weights = count_weights(np.array([0] * 900 + [1]), 1.0)
    assert weights[0] == 1 and weights[-1] == 10


def test_rows_that_teach_nothing_are_drawn_by_the_floor():
    """Rows 0 to 29 are always answered right, rows 30 to 59, of the same count, half of the time."""
    one = sampler(difficulty_sampling=True)
    for n in range(30):
        one.observe(n, [n, 30 + n], [1.0, 0.5])
    weights = one.weights(29 + row_sampler.ROLLOUTS_AHEAD + 1)
    assert np.all(weights <= PRIOR + FLOOR + 1e-12) and np.all(weights > FLOOR)
    assert weights[30:60].mean() > 1.7 * weights[:30].mean()
    assert weights[60:90] == pytest.approx(PRIOR + FLOOR)  # another count: nothing is known
    mastered = sampler(difficulty_sampling=True)  # rows that were not seen lean on their true count
    for n in range(40):
        mastered.observe(n, [n], [1.0])
    weights = mastered.weights(60)
    assert weights[50] < 0.5 * (PRIOR + FLOOR) < weights[60]


def test_a_row_is_drawn_in_proportion_to_its_weight():
    one = sampler(difficulty_sampling=True, count_balance=0.5)
    one.observe(0, range(0, 100, 2), [1.0] * 50)
    fixed = one.weights(40)
    one.weights = lambda rollout: fixed
    shares, expected = shares_drawn(one, 4000), fixed / fixed.sum()
    assert np.abs(shares - expected).max() < 0.004  # 4 standard errors of 16,000 draws, and what is left out
    assert np.corrcoef(shares, expected)[0, 1] > 0.95


def test_what_is_drawn_follows_from_what_was_seen_in_time():
    """Not from how far ahead it is drawn, the order of ranks, what is forgotten, or a stop in between."""
    late = row_sampler.ROLLOUTS_AHEAD
    seen = {n: ([n % 100, (7 * n + 1) % 100], [(n % 5) / 4, (n % 3) / 2]) for n in range(MEMORY + 60)}
    one, other = sampler(difficulty_sampling=True), sampler(difficulty_sampling=True)
    for n, (rows, shares) in seen.items():
        ahead = other.rows(n + late)  # before rollout n is observed
        one.observe(n, rows, shares)
        assert one.rows(n + late) == ahead
        other.observe(n, rows[::-1], shares[::-1])
        if n == MEMORY + 30:
            state, other = json.loads(json.dumps(other.state())), sampler(difficulty_sampling=True)
            state["pass_rates"][str(n + 1)] = [[5, 1.0]]  # of a rollout that was made and not trained on
            other.restore(state, n + 1)
    fewer = RowSampler(one.args, Texts(), range(50))  # as after --accept_changes
    fewer.restore(json.loads(json.dumps(one.state())), n + 1)
    assert {place for groups in fewer.groups.values() for place in groups} == set(range(50))
    assert len(fewer.rows(n + 1)) == 4
    assert len(one.groups) == MEMORY + late + 1
    assert np.array_equal(one.weights(n + 1), other.weights(n + 1)) and one.rows(n + 1) == other.rows(n + 1)
    one.groups.clear()
    assert one.rows(n + 1) != other.rows(n + 1)


def test_refills_are_none_of_the_rollouts_own():
    one = sampler(count_balance=1.0)
    tries = [one.rows(5), *(one.refill(5, attempt) for attempt in (1, 2))]
    assert len({row for rows in tries for row in rows}) == 12
    few = RowSampler(arguments(gradient_accumulation_steps=4, count_balance=1.0), Texts(), range(3))
    assert set(few.rows(0)) == {0, 1, 2} and len(few.rows(0)) == 4


# --- groups -------------------------------------------------------------------------------------------------


def rewards_of(*right: int) -> torch.Tensor:
    return torch.tensor([[1.0] * n + [0.0] * (8 - n) for n in right])


def test_the_groups_that_vary_most_are_kept_in_their_order():
    rewards = rewards_of(0, 3, 8, 1, 5, 8, 4)
    assert most_informative(rewards, range(7), 3) == [1, 4, 6]  # 3 and 5 of 8 are equals
    assert most_informative(rewards, range(7), 2) == [1, 6]
    assert most_informative(rewards, [6, 5, 4, 3, 2, 1, 0], 2) == [6, 4]  # the first place wins
    assert most_informative(rewards, range(7), 5) == [0, 1, 3, 4, 6]  # filled up in order
    assert most_informative(1e-4 * rewards, range(7), 3) == [1, 4, 6]  # however small they are
    rewards[2] = torch.tensor([torch.nan] * 7 + [1.0])
    rewards[0, 0] = torch.inf
    assert most_informative(rewards, range(7), 2) == [0, 6]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_each_update_has_the_same_groups_on_any_number_of_ranks(world):
    """48 groups for two updates of 16: as one process chooses them, handed to the ranks in equal shares."""
    args = SimpleNamespace(
        prompts_per_rollout=32, prompts_per_update=16, prompts_drawn=48, world_size=world, process_index=0
    )
    by_place = rewards_of(*np.random.default_rng(0).integers(0, 9, 48))
    expected = most_informative(by_place, range(48), 32)
    places = prompt_places(args, 48)  # rank after rank
    kept = kept_groups(args, by_place[places])
    made = [places[rank * 48 // world : (rank + 1) * 48 // world] for rank in range(world)]
    sent = []
    for rank in range(world):  # every rank sends, then all receive
        share_out(made[rank], kept, rank, world, lambda moved: sent.extend(moved) or sent)
    trained = [share_out(made[rank], kept, rank, world, lambda moved: sent) for rank in range(world)]
    assert {len(share) for share in trained} == {32 // world}
    for update in range(2):
        per_rank = 16 // world
        got = [place for share in trained for place in share[update * per_rank : (update + 1) * per_rank]]
        assert got == expected[update * 16 : (update + 1) * 16]
    assert len(sent) < 32 * (world > 1) + 1


def test_oversampling_in_a_run(folder, tmp_path):  # noqa: F811
    """Even counts are stuck. Twice as many prompts are rolled out, and every group that is trained on varies
    as long as enough do; the log is of all that were rolled out."""
    more = ("--reward_funcs", "tests.rewards.half_stuck", "--reward_weights", 1, "--save_strategy", "no")
    more += ("--max_steps", 2)
    run(folder, tmp_path / "out", *more, "--gradient_accumulation_steps", 4, "--oversample", 2)
    run(folder, tmp_path / "all", *more, "--gradient_accumulation_steps", 8)
    kept, every = drawn_in(tmp_path / "out")[:4], drawn_in(tmp_path / "all")[:8]
    assert [group for group in every if group in kept] == kept and len(kept) == 4
    logs = [[log for log in lines(tmp_path / d / "logs.jsonl") if "loss" in log][0] for d in ("out", "all")]
    for name in ("reward", "zero_variance", "completions/mean_length", "rewards/tests.rewards.half_stuck"):
        assert logs[0][name] == logs[1][name]
    odd = sum(answer % 2 for _, _, answer, _ in every)
    assert logs[0]["oversample/informative"] == min(odd, 4) / 4
    assert sum(answer % 2 for _, _, answer, _ in kept) == min(odd, 4)
    assert logs[1]["zero_variance"] > 0 and "oversample/informative" not in logs[1]
    assert logs[0]["epoch"] == 8 / 20


ALL = ("--oversample", 1.5, "--difficulty_sampling", "true", "--count_balance", 0.5)


def test_a_resumed_run_draws_the_same(folder, tmp_path, monkeypatch):  # noqa: F811
    """What is known of the rows comes back: rollouts from the third on are drawn by it."""
    monkeypatch.setattr(row_sampler, "ROLLOUTS_AHEAD", 1)
    more = (*ALL, "--save_steps", 3, "--dataloader_num_workers", 1, "--gradient_accumulation_steps", 4)
    run(folder, tmp_path / "whole", *more, "--max_steps", 6)
    run(folder, tmp_path / "parts", *more, "--max_steps", 3)
    run(folder, tmp_path / "parts", *more, "--max_steps", 6, "--dataloader_num_workers", 0)
    for read in (drawn_in, lambda out: without_times(lines(out / "logs.jsonl"))):
        assert read(tmp_path / "parts") == read(tmp_path / "whole")
    markers = [json.loads((tmp_path / d / "checkpoint-6/COMPLETE").read_text()) for d in ("parts", "whole")]
    assert markers[0]["pass_rates"] == markers[1]["pass_rates"]
    assert [len(groups) for groups in markers[0]["pass_rates"].values()] == [6] * 6


# --- rewards ------------------------------------------------------------------------------------------------


def test_close_is_for_off_by_one_alone():
    texts = ["<answer> 2 </answer>", "<answer>4</answer>", "<answer> 3 </answer>", "<answer>5</answer>", "2"]
    assert close_reward(as_conversations(texts), answer=[3] * 5) == [1, 1, 0, 0, 0]


# --- flags --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (("--oversample", 0.5), "--oversample 0.5: an update of 1 prompts on 1 processes would roll out 0"),
        (("--oversample", 1.3), "--oversample 1.3: .* so that it is a whole number"),
        (("--oversample", "nan"), "--oversample nan"),
        (("--oversample", "1e300"), "--oversample 1e\\+300: .* set 1 up to 100"),
        (("--oversample", 2, "--dynamic_sampling", 1), "both put other groups in the place"),
        (("--count_balance", -1), "--count_balance -1.0: set 0 or more"),
        (("--count_balance", 1, "--shuffle_dataset", "false"), "--shuffle_dataset false: "),
        (("--difficulty_sampling", "true", "--dataloader_num_workers", 9), "--dataloader_num_workers 9: "),
    ],
)
def test_refused(flags, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_args(*parse(*FLAGS, *flags))


def test_true_counts_are_not_looked_at_for_a_reward_without_labels():
    label_free = [Reward("negative_entropy", negative_entropy_reward, 1.0)]
    for flag in ({"difficulty_sampling": True}, {"count_balance": 1.0}):
        assert "look at the true counts" in unused_flags(arguments(**flag), label_free)[0]
        assert not unused_flags(arguments(**flag), [*label_free, Reward("close", close_reward, 0.0)])
