"""Rewards without labels against hand-worked numbers, and what must never earn."""

import math

import pytest
import torch

from open_r1.grpo import reward_funcs_registry
from open_r1.label_free import (
    Vote,
    hold_vote,
    majority_vote_reward,
    negative_entropy_reward,
    self_certainty_reward,
    vote_numbers,
)
from open_r1.packing import pack
from open_r1.rewards import as_conversations, check_signature, resolve_rewards
from open_r1.scoring import add_scoring_forward, entropy_of, self_certainty_of
from tests.prompts import make_prompts
from tests.test_grpo import folder, lines, run  # noqa: F401
from tests.tiny import VOCABULARY, tiny_model


def answers(*given) -> list[str]:
    """Texts: an int in its answer block, anything else as it is."""
    return [f"<answer> {a} </answer>" if isinstance(a, int) else a for a in given]


def majority(*texts, group=None, votes=None, **options):
    group = group or [0] * len(texts)
    by_group = {n: tuple(t for t, g in zip(texts, group, strict=True) if g == n) for n in group}
    votes = [by_group[n] for n in group] if votes is None else [tuple(votes)] * len(texts)
    return majority_vote_reward(as_conversations(texts), group=group, votes=votes, **options)


# --- majority vote ------------------------------------------------------------------------------------------


def test_the_majority_earns():
    assert majority(*answers(3, 4, 3, 5)) == [1, 0, 1, 0]


def test_each_group_has_its_own_majority():
    """Groups may stand between one another."""
    assert majority(*answers(3, 4, 3, 4, 4, 4), group=[0, 1, 0, 1, 0, 1]) == [1, 1, 1, 1, 0, 1]


@pytest.mark.parametrize("unparsed", ["", "None", "None of them", "I count 3.", "<answer> three </answer>"])
def test_no_answer_never_wins_and_never_earns(unparsed):
    """In public code an empty answer, or the word None, can win the vote and is rewarded then."""
    assert majority(unparsed, unparsed, unparsed, *answers(3)) == [0, 0, 0, 1]
    assert majority(unparsed, unparsed) == [0, 0]
    assert hold_vote([unparsed] * 3) == Vote(None, 0.0, False)


def test_integers_are_normalised():
    texts = ["<answer>3</answer>", "<answer> 03 </answer>", "<answer>\n3\n</answer>", *answers(4, 4)]
    assert majority(*texts) == [1, 1, 1, 0, 0]


def test_the_first_answer_counts_as_for_the_grader():
    assert majority(*answers(3, 3), "<answer>3</answer> <answer>4</answer>", *answers(4)) == [1, 1, 1, 0]


def test_of_a_tie_the_first_given_wins_or_none():
    assert majority(*answers(5, 4, 4, 5, 3)) == [1, 0, 0, 1, 0]
    assert majority(*answers(4, 5, 4, 5, 3)) == [1, 0, 1, 0, 0]
    assert majority(*answers(4, 5, 4, 5, 3), ties="skip") == [0, 0, 0, 0, 0]
    assert majority(*answers(4, 4, 5), ties="skip") == [1, 1, 0]
    with pytest.raises(ValueError, match="ties=last: set one of first, skip"):
        majority(*answers(4), ties="last")


def test_a_small_majority_may_not_count():
    """The share is of all completions: those without an answer are no votes for the winner."""
    texts = answers(4, 4, 5, "?", "?")
    assert majority(*texts, minimum_share=0.4) == [1, 1, 0, 0, 0]
    assert majority(*texts, minimum_share=0.41) == [0, 0, 0, 0, 0]
    for share in (7, -1):
        with pytest.raises(ValueError, match=f"minimum_share={share}: a share; set 0 up to 1"):
            majority(*texts, minimum_share=share)


def test_more_vote_than_are_trained():
    """The two trained ones say 7; the five others outvote them."""
    assert majority(*answers(7, 7), votes=answers(7, 7, 4, 4, 4, "?", 5)) == [0, 0]
    assert majority(*answers(7, 4), votes=answers(7, 4, 4, 3)) == [0, 1]


def test_vote_numbers_by_hand():
    votes = answers(4, 5, "?", 4, 6, 6, 4, 5)  # 4 wins with 3 of 8; the true count is 5; trained: the first 4
    got = vote_numbers(votes, answer=5, trained=4)
    assert got == {
        "votes/majority_ratio": 3 / 8, "votes/tied": 0, "votes/no_label": 0, "votes/label_accuracy": 0,
        "votes/reward_accuracy": 3 / 8,  # "?", 6 and 6 are rightly given 0
        "votes/ground_truth_ratio": 2 / 8, "votes/pass": 1, "votes/post_reward_accuracy": 1 / 4,
        "votes/post_ground_truth_ratio": 1 / 4, "votes/post_pass": 1,
    }  # fmt: skip
    right = vote_numbers(votes, answer=4, trained=4)
    assert right["votes/label_accuracy"] == right["votes/reward_accuracy"] == 1
    tied = vote_numbers(answers(4, 5), answer=4, trained=2, ties="skip")
    assert tied["votes/tied"] == tied["votes/no_label"] == 1 and tied["votes/label_accuracy"] == 0
    nobody = vote_numbers(["?"] * 2, answer=4, trained=2)
    assert nobody["votes/no_label"] == 1 and nobody["votes/reward_accuracy"] == 1


def test_without_true_counts_only_what_needs_none_is_known():
    got = vote_numbers(answers(4, 4, "?"), answer=None, trained=2)
    assert got["votes/majority_ratio"] == pytest.approx(2 / 3) and math.isnan(got["votes/label_accuracy"])
    assert math.isnan(got["votes/post_pass"])


# --- certainty and entropy ----------------------------------------------------------------------------------

LOGITS = torch.tensor([[math.log(2), 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])


def test_token_statistics_by_hand():
    """Probabilities 2/5, 1/5, 1/5, 1/5: KL(uniform || p) = log 5 - log(2) / 4 - log 4."""
    certainty = math.log(5) - math.log(2) / 4 - math.log(4)
    assert self_certainty_of(LOGITS).tolist() == pytest.approx([certainty, 0.0], abs=1e-6)
    entropy = -(2 / 5 * math.log(2 / 5) + 3 / 5 * math.log(1 / 5))
    assert entropy_of(LOGITS).tolist() == pytest.approx([entropy, math.log(4)])


def test_self_certainty_grows_without_limit_where_the_best_token_stays():
    """The direction in which it is cheated: the tail's logits fall."""
    tails = torch.tensor([[0.0, -10.0], [0.0, -100.0], [0.0, -1000.0]])
    values = self_certainty_of(tails).tolist()
    assert values == pytest.approx([5 - math.log(2), 50 - math.log(2), 500 - math.log(2)], abs=1e-3)
    assert entropy_of(tails)[1:].tolist() == pytest.approx([0, 0])


def test_rewards_are_means_over_the_tokens():
    """Per token, not a sum: twice as long a completion of the same certainty earns the same."""
    values = [torch.tensor([1.0, 3.0]), torch.tensor([2.0] * 6)]
    completions = as_conversations(answers(3, "?"))
    assert self_certainty_reward(completions, self_certainty=values) == [2.0, 2.0]
    assert negative_entropy_reward(completions, entropy=values) == [-2.0, -2.0]


def test_format_option_of_rent():
    values = [torch.tensor([1.0, 3.0]), torch.tensor([0.1])]
    completions = as_conversations(answers(3, r"\boxed}"))
    rent = {"entropy": values, "unparsed_entropy": 7.0}
    assert negative_entropy_reward(completions, **rent) == [-2.0, -7.0]
    assert negative_entropy_reward(completions, **rent, format_only=True) == [0.0, -7.0]
    with pytest.raises(ValueError, match="format_only needs unparsed_entropy"):
        negative_entropy_reward(completions, entropy=values, format_only=True)
    with pytest.raises(ValueError, match="unparsed_entropy=-7 rewards what cannot be read"):
        negative_entropy_reward(completions, entropy=values, unparsed_entropy=-7)


@pytest.mark.parametrize("limit", [None, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_chunked_forward_gives_the_statistics_of_the_tempered_logits(limit, temperature):
    """Position by position against the library's own forward: the logits that predict each token, not those
    behind it."""
    prompt, completion = make_prompts()[0], torch.tensor([65, 70, 66, 90, 258])
    ids = torch.cat([prompt.input_ids, completion])[None]
    model = tiny_model()
    logits = model(
        input_ids=ids, pixel_values=prompt.pixel_values, image_grid_thw=prompt.image_grid_thw,
        mm_token_type_ids=(ids == model.config.image_token_id).int(),
    ).logits[0, prompt.input_ids.numel() - 1 : -1]  # fmt: skip
    logits = (logits / temperature)[:, :limit]
    assert logits.shape == (5, limit or VOCABULARY)
    scoring, row = add_scoring_forward(tiny_model()), pack([(prompt, [completion])])
    probs = logits.softmax(-1)
    expected = {
        "entropy": -(probs * probs.log()).sum(-1),
        "self_certainty": -math.log(logits.shape[1]) - probs.log().mean(-1),
    }
    for statistic, values in expected.items():
        got = scoring(
            **row.model_inputs(), temperature=temperature, statistic=statistic, vocab_limit=limit
        )
        assert torch.allclose(got, values, atol=1e-4), statistic


# --- options and flags --------------------------------------------------------------------------------------


def test_options_of_rewards():
    names = ["negative_entropy", "majority_vote"]
    options = ["negative_entropy.unparsed_entropy=7.0", "majority_vote.ties=skip"]
    rent, ttrl = resolve_rewards(names, None, reward_funcs_registry, options=options)
    assert rent.options == {"unparsed_entropy": 7.0} and ttrl.options == {"ties": "skip"}
    available = {
        "completions": as_conversations(answers("?", 3)), "group": [0, 0],
        "votes": [tuple(answers(3, 4))] * 2,
        "entropy": [torch.tensor([1.0])] * 2, "answer": [3, 3],
    }  # fmt: skip
    assert rent(available) == [-7.0, -1.0] and ttrl(available) == [0.0, 0.0]
    with pytest.raises(ValueError, match="majority_vote.ties: ties is a column too"):
        check_signature(ttrl, ["question", "answer", "ties"])


@pytest.mark.parametrize(
    "option, sentence",
    [
        ("majority_vote.tie=skip", "tie=skip: majority_vote has ties, minimum_share"),
        ("majority_vote.ties", "give NAME.PARAMETER=VALUE"),
        ("accuracy.ties=skip", r"NAME is of --reward_funcs \(majority_vote self_certainty\)"),
        ("self_certainty.self_certainty=1", "self_certainty has no options"),
    ],
)
def test_bad_options_are_refused(option, sentence):
    names = ["majority_vote", "self_certainty"]
    with pytest.raises(ValueError, match=sentence):
        resolve_rewards(names, None, reward_funcs_registry, options=[option])


@pytest.mark.parametrize(
    "more, sentence",
    [
        (("--vote_generations", 8), "--vote_generations 8: no reward counts votes"),
        (("--vote_generations", 2), "--vote_generations 2: .* set at least --num_generations 4"),
        (("--vocab_limit", 264), "--vocab_limit 264: no reward asks for entropy or self_certainty"),
        (
            ("--vocab_limit", 321, "--reward_funcs", "self_certainty", "--reward_weights", 1),
            "--vocab_limit 321: the model has 320 logits",
        ),
    ],
)
def test_flags_that_would_do_nothing_are_refused(folder, tmp_path, more, sentence):  # noqa: F811
    with pytest.raises(ValueError, match=sentence):
        run(folder, tmp_path / "out", "--max_steps", 1, "--dry_run", "true", *more)


# --- runs ---------------------------------------------------------------------------------------------------


def test_more_vote_than_are_trained_in_a_run(folder, tmp_path, monkeypatch):  # noqa: F811
    """Six vote, the first four are trained on; they are those of a run without the two others."""
    seen = []

    def watched(completions, votes, completion_ids, **kwargs):
        seen.append((votes, [c[0]["content"] for c in completions]))
        return [float(sum(ids) % 7) for ids in completion_ids]

    monkeypatch.setitem(reward_funcs_registry, "watched", watched)
    more = ("--max_steps", 1, "--save_strategy", "no", "--reward_weights", 1, 1, "--reward_funcs", "watched")
    run(folder, tmp_path / "six", *more, "majority_vote", "--vote_generations", 6)
    run(folder, tmp_path / "four", *more, "majority_vote")
    (_, _, (votes, texts)), (_, _, (few, same)) = seen[:3], seen[3:]  # two calls each are trials on gold
    assert texts == same and [len(v) for v in votes] == [6] * 8 and [len(v) for v in few] == [4] * 8
    assert all(text in vote for text, vote in zip(texts, votes, strict=True))
    assert list(votes[0][:4]) == texts[:4] and list(votes[4][:4]) == texts[4:] == list(few[4])
    (log,) = [log for log in lines(tmp_path / "six/logs.jsonl") if "loss" in log]
    assert log["votes/no_label"] == 1 and log["votes/majority_ratio"] == log["votes/pass"] == 0
    assert log["rewards/majority_vote"] == 0


@pytest.mark.parametrize("limit", [(), ("--vocab_limit", 264)])
def test_certainty_and_entropy_in_a_run(folder, tmp_path, limit):  # noqa: F811
    """The reward is the statistic of the policy that sampled, of the limited vocabulary."""
    names = ("self_certainty", "negative_entropy")
    run(
        folder, tmp_path / "out", "--max_steps", 1, "--save_strategy", "no", "--temperature", 0.7,
        "--reward_funcs", *names, "--reward_weights", 1, 0, *limit,
    )  # fmt: skip
    (log,) = [log for log in lines(tmp_path / "out/logs.jsonl") if "loss" in log]
    assert log["reward"] == log["rewards/self_certainty"] > 0 > log["rewards/negative_entropy"]
    # log V of all 320 logits bounds it; the estimate from the sampled tokens lies near.
    assert -math.log(320) < log["rewards/negative_entropy"]
    assert abs(log["rewards/negative_entropy"] + log["completions/entropy"]) < 0.5
    assert log["reward_std"] > 0 and log["grad_norm"] > 0
