"""Token weights by hand, the views they come from, and runs with them."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from open_r1.advantages import LossSettings, grpo_loss, token_weights
from open_r1.arguments import GRPOArguments
from open_r1.rollout import PREFILL_TOKENS, FastEngine
from open_r1.sampling import Sampling, sampling_keys
from open_r1.token_weights import (
    TokenWeights,
    check_token_weights,
    dependency,
    prpo_weights,
    resolve_token_weights,
    vppo_weights,
)
from open_r1.views import CHANGES, ImageViews, TokenWeigher
from tests.prompts import make_prompts
from tests.test_grpo import folder, lines, run, without_times  # noqa: F401
from tests.tiny import tiny_model, tiny_processor

ONE = ("--max_steps", 2, "--save_strategy", "no", "--prompts_per_row", 2)


def k3(difference: float) -> float:
    return math.exp(difference) - difference - 1


def test_dependency_by_hand():
    """k3 of what the view changes; a token that becomes much more likely is clamped to 10."""
    got = dependency(torch.tensor([-0.1, -3.0, -1.0, -2.0]), torch.tensor([-3.0, -0.1, -1.0, -1e9]))
    assert got.tolist() == pytest.approx([k3(-2.9), 10, 0, 10])
    assert k3(2.9) > 10


def test_prpo_by_hand():
    """Four tokens: grounded and stable, grounded and shaken by noise, weakly grounded, not grounded."""
    own = torch.full((4,), -1.0)
    depends, moves = [k3(-2.0), k3(-2.0), k3(-0.5), 0.0], [0.0, k3(-2.0), 0.0, 0.0]
    without, noised = torch.tensor([-3.0, -3.0, -1.5, -1.0]), torch.tensor([-1.0, -3.0, -1.0, -1.0])
    (got,) = prpo_weights([own], [without], [noised], threshold=0.4, strength=1.0)
    robust = [math.log1p(d * d / (d + s + 1e-8)) for d, s in zip(depends, moves, strict=True)]
    share = [r / robust[0] for r in robust]  # the lowest is 0
    expected = [1 + max(0, (n - 0.4) / 0.6) for n in share]
    assert got.tolist() == pytest.approx(expected)
    assert got[0] == 2 and 1 < got[1] < 2 and got[2] == got[3] == 1
    (strong,) = prpo_weights([own], [without], [noised], threshold=0.0, strength=0.5)
    assert strong.tolist() == pytest.approx([1 + 0.5 * n for n in share])


def test_prpo_keeps_one_where_nothing_stands_out():
    """A single token, equal dependencies, no dependency, and differences as small as rounding."""
    for own, without in (([-1.0], [-5.0]), ([-1.0] * 3, [-2.0] * 3), ([-1.0] * 3, [-1.0] * 3)):
        logps, view = torch.tensor(own), torch.tensor(without)
        assert torch.equal(prpo_weights([logps], [view], [view])[0], torch.ones(len(own)))
    noise = torch.tensor([0.01, -0.02, 0.015])
    assert torch.equal(prpo_weights([noise * 0], [noise], [noise * 0])[0], torch.ones(3))


def test_vppo_by_hand():
    """Two completions of 5 and 2 tokens: of the first ceil(0.4 * 5) = 2 are left, of the second 1. The first
    depends less on the image on average: the scales are 0.9 and 1.1, their mean is 1."""
    first = torch.tensor([-0.5, -3.0, 0.0, -1.0, -2.0])  # what destroying changes
    second = torch.tensor([-4.0, -3.0])
    own = [torch.zeros(5), torch.zeros(2)]
    assert dependency(own[0], first).mean() < dependency(own[1], second).mean()
    plain = vppo_weights(own, [first, second], renormalise=False)
    assert [one.tolist() for one in plain] == [
        pytest.approx([0, 0.9, 0, 0, 0.9]), pytest.approx([1.1, 0])
    ]  # fmt: skip
    filtered = vppo_weights(own, [first, second])
    assert [one.tolist() for one in filtered] == [
        pytest.approx([0, 0.9 * 2.5, 0, 0, 0.9 * 2.5]), pytest.approx([2.2, 0])
    ]  # fmt: skip
    assert [float(one.mean()) for one in filtered] == pytest.approx([0.9, 1.1])  # the scales: nothing is lost


def test_vppo_scales_of_a_group_by_hand():
    """Dependencies of 0, 1 and 3 times one unit: z is 0, 1/3 and 1, and its mean 4/9 gives b_max 1.125."""
    unit = k3(-1.0)
    scores = [0.0, unit, 3 * unit]
    views = [torch.full((2,), _inverse_k3(score)) for score in scores]
    weights = vppo_weights([torch.zeros(2)] * 3, views)
    scales = [0.9, 0.9 + 0.225 / 3, 1.125]
    for one, scale in zip(weights, scales, strict=True):
        assert one.tolist() == pytest.approx([scale] * 2, abs=1e-4)  # equal tokens: none is filtered
    equal = vppo_weights([torch.zeros(2)] * 3, [torch.full((2,), -1.0)] * 3)
    assert all(torch.equal(one, torch.ones(2)) for one in equal)


def _inverse_k3(value: float) -> float:
    low, high = -40.0, 0.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if k3(middle) > value else (low, middle)
    return high


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_weights_act_on_advantages_and_not_on_the_normaliser(loss_type):
    """The gradient of an on-policy token is -A w n, n being what the token weighs in the loss as ever."""
    lengths, owners = torch.tensor([1, 3]), torch.tensor([0, 1, 1, 1])
    normaliser = token_weights(lengths, torch.tensor([False] * 2), loss_type, 10, False, 2, 4)[owners]
    advantages, weights = torch.tensor([1.0, -1.0, -1.0, -1.0]), torch.tensor([1.0, 2.0, 0.0, 1.5])
    logps = torch.zeros(4, requires_grad=True)
    loss, _ = grpo_loss(logps, None, None, advantages * weights, normaliser, owners, LossSettings())
    loss.backward()
    assert logps.grad.tolist() == pytest.approx((-advantages * weights * normaliser).tolist())


# --- views --------------------------------------------------------------------------------------------------


def test_views_change_pixels_only_and_follow_from_seed_rollout_and_row():
    prompts, processor = make_prompts(), tiny_processor()
    cpu, two_images = torch.device("cpu"), prompts[2]

    def make(name: str, rollout: int = 7, seed: int = 3, row: int = 2):
        views, prompt = ImageViews(processor.image_processor, seed, cpu), replace(two_images, row=row)
        return views.view(prompt, rollout, name, CHANGES[name])

    destroyed, perturbed = make("destroyed"), make("perturbed")
    for view in (destroyed, perturbed):
        assert torch.equal(view.position_ids, two_images.position_ids)
        assert torch.equal(view.image_grid_thw, two_images.image_grid_thw)
        assert view.pixel_values.shape == two_images.pixel_values.shape
    mean, std = (
        torch.tensor(getattr(processor.image_processor, f"image_{name}")) for name in ("mean", "std")
    )

    def pixels(prompt):  # [patches, channels, frames, values]
        return (
            prompt.pixel_values.view(len(prompt.pixel_values), 3, 2, -1) * std[:, None, None]
            + mean[:, None, None]
        )

    black = pixels(destroyed).abs().amax((1, 2, 3)) < 1e-5
    assert 0.3 < black.float().mean() < 0.7
    assert torch.allclose(destroyed.pixel_values[~black], two_images.pixel_values[~black], atol=1e-5)
    noised = pixels(perturbed)
    assert noised.min() > -1e-5 and noised.max() < 1 + 1e-5
    assert torch.equal(noised[:, :, 0], noised[:, :, 1])  # both frames of a still image
    assert 0.05 < (noised - pixels(two_images)).std() < 0.15
    again = make("perturbed")
    assert torch.equal(again.pixel_values, perturbed.pixel_values)
    for other in (make("perturbed", **one) for one in ({"rollout": 8}, {"seed": 4}, {"row": 3})):
        assert not torch.equal(other.pixel_values, perturbed.pixel_values)


@pytest.fixture(scope="module")
def rolled_out():
    prompts = make_prompts()
    sampling, keys = Sampling(False, 6, temperature=0.8), sampling_keys(1, 0, range(4), 3)
    engine = FastEngine(tiny_model(), tiny_processor())
    return engine, prompts, engine.generate(prompts, 3, sampling, keys)


def weigher_of(engine, function) -> TokenWeigher:
    args = GRPOArguments(
        output_dir="out", use_cpu=True, report_to="none", eval_strategy="no", seed=3, temperature=0.8
    )
    return TokenWeigher(TokenWeights("mine", function), engine.model, tiny_processor(), args)


def test_views_are_scored_as_the_library_scores_them_alone(rolled_out):
    """All views of two prompts and their completions are one row; the log-probs are those of separate rows,
    at the temperature of sampling. A hidden image is one that the attention mask leaves out."""
    engine, prompts, groups = rolled_out

    def all_three(logps, destroyed, hidden, perturbed):
        return [torch.ones_like(one) for one in logps]

    weigher = weigher_of(engine, all_three)
    first, second = weigher.score(5, prompts[:2], groups[:2])
    plain = tiny_model()
    for prompt, group, scored in ((prompts[0], groups[0], first), (prompts[1], groups[1], second)):
        for name in ("destroyed", "hidden", "perturbed"):
            view = prompt if name == "hidden" else weigher.view(prompt, 5, name)
            for completion, got in zip(group, scored[name], strict=True):
                expected = library_logps(plain, view, completion.token_ids, name == "hidden")
                assert torch.allclose(got, expected, atol=1e-4)
                assert (got - completion.logps).abs().max() > 0.01


def library_logps(model, prompt, completion, hide: bool) -> torch.Tensor:
    """[T] at temperature 0.8, from the library's own forward."""
    ids = torch.cat([prompt.input_ids, completion])[None]
    image = ids == model.config.image_token_id
    length = completion.numel()
    behind = (prompt.next_position + torch.arange(length)).expand(3, -1)
    with torch.no_grad():
        logits = model(
            input_ids=ids, pixel_values=prompt.pixel_values, image_grid_thw=prompt.image_grid_thw,
            attention_mask=(~(image & hide)).long(), mm_token_type_ids=image.int(),
            position_ids=torch.cat([prompt.position_ids, behind], dim=1)[:, None],
        ).logits[0, -length - 1 : -1]  # fmt: skip
    return (logits / 0.8).log_softmax(-1).gather(1, completion[:, None])[:, 0]


def test_who_is_scored(rolled_out, monkeypatch):
    """Text alone (prompt 3) and advantages of 0 (prompt 1) keep weights of exactly 1, and no pass is made for
    them."""
    engine, prompts, groups = rolled_out
    asked, scored = [], []

    def doubles(logps, destroyed, advantages):
        asked.append(advantages.tolist())
        return [2 * torch.ones_like(one) for one in logps]

    weigher = weigher_of(engine, doubles)
    score = weigher.score
    weigher.score = lambda *args: (scored.append([p.row for p in args[1]]), score(*args))[1]
    advantages = torch.tensor([[1.0, -1.0, 0.0], [0.0] * 3, [math.nan] * 3, [1.0, -1.0, 0.0]])
    weights, numbers = weigher.weigh(0, prompts, groups, advantages)
    monkeypatch.setitem(PREFILL_TOKENS, "cpu", 1)  # a row each
    assert [weigher.rows([0, 2], prompts, groups)] == [[[0], [2]]]
    assert scored == [[0, 2]] and asked[0] == [1, -1, 0]
    assert [set(one.tolist()) for one in weights] == [{2.0}, {1.0}, {2.0}, {1.0}]
    assert [len(one) for one in weights] == [sum(len(c.token_ids) for c in group) for group in groups]
    logged = weigher.metrics(numbers[None])
    assert logged["token_weights/scored"] == 0.5 and logged["token_weights/mean"] == 2
    assert (logged["token_weights/min"], logged["token_weights/max"]) == (1, 2)
    assert logged["token_weights/above_1"] == 1 and logged["token_weights/k3_destroyed"] > 0
    assert "token_weights/k3_perturbed" not in logged
    none, numbers = weigher.weigh(0, prompts, groups, torch.zeros(4, 3))
    assert len(scored) == 1 and all(torch.equal(one, torch.ones_like(one)) for one in none)
    assert math.isnan(weigher.metrics(numbers[None])["token_weights/k3_destroyed"])


def test_numbers_of_all_ranks_are_one_mean(rolled_out):
    engine, prompts, groups = rolled_out
    weigher = weigher_of(engine, prpo_weights)
    advantages = torch.tensor([[1.0, -1.0, 0.5]] * 4)
    _, whole = weigher.weigh(2, prompts, groups, advantages)
    halves = [weigher.weigh(2, prompts[i : i + 2], groups[i : i + 2], advantages[:2])[1] for i in (0, 2)]
    one, two = weigher.metrics(whole[None]), weigher.metrics(torch.stack(halves))
    del one["time/views_s"], two["time/views_s"]
    assert two == pytest.approx(one, rel=1e-5)
    assert one["token_weights/max"] == 2 and 1 < one["token_weights/mean"] < 2


# --- flags --------------------------------------------------------------------------------------------------


def needs_more(logps, colours):
    return logps


def one_for_all(logps, factor=1.0):
    return torch.full((len(logps),), factor)


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("vpo", [], "--token_weights vpo is no known function: known names are prpo, vppo"),
        (None, ["strength=2"], "--token_weight_options strength=2 without --token_weights"),
        ("prpo", ["strenght=2"], "strenght=2: prpo has threshold, strength"),
        ("prpo", ["strength"], "strength: give PARAMETER=VALUE"),
        ("prpo", ["destroyed=2"], "destroyed=2: prpo has threshold, strength"),
        ("prpo", ["strength=much"], "strength=much: prpo takes a number for strength"),
        ("prpo", ["strength=true"], "strength=true: prpo takes a number for strength"),
        ("prpo", ["strength=Infinity"], "strength=Infinity: prpo takes a finite number for strength"),
        ("vppo", ["renormalise=no"], "renormalise=no: vppo takes true or false for renormalise"),
        (f"{__name__}.needs_more", [], "asks for colours, which is none of logps, destroyed"),
    ],
)
def test_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        resolve_token_weights(name, options)


def test_options_and_a_function_of_ones_own():
    assert resolve_token_weights("prpo", ["strength=0.5"]).options == {"strength": 0.5}
    mine = resolve_token_weights(f"{__name__}.one_for_all", ["factor=3"])
    assert not mine.wants("destroyed")
    with pytest.raises(ValueError, match=r"must return a list of 2 tensors, one weight a token \(3, 1\)"):
        mine({"logps": [torch.zeros(3), torch.zeros(1)], "advantages": torch.zeros(2)})


def sometimes_nan(logps, power=0.5):
    return [(one + 1) ** power for one in logps]


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("prpo", ["threshold=1"], "threshold=1, strength=1.0: set 0 or more, the threshold below 1"),
        ("prpo", ["strength=-5"], "threshold=0.4, strength=-5: set 0 or more"),
        ("vppo", ["share=-1"], "share=-1, lowest=0.9: set up to 1, and the share above 0"),
        ("vppo", ["lowest=5"], "share=0.4, lowest=5: set up to 1"),
        (f"{__name__}.sometimes_nan", [], "sometimes_nan gives weights that are not finite: repair it"),
        (f"{__name__}.sometimes_nan", ["power=1"], None),
    ],
)
def test_weights_are_tried_before_the_run(name, options, message):
    recipe = SimpleNamespace(token_weights=name, token_weight_options=options)
    run = SimpleNamespace(recipe=recipe, args=SimpleNamespace(num_generations=4))
    _, faults = check_token_weights(run)
    assert [message in fault for fault in faults] == [True] * (message is not None)


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--importance_sampling_level", "sequence", "--loss_type", "grpo"), "spreads each token's weight"),
        (("--rollout_engine", "transformers"), "the fast engine's model scores the views; set fast"),
    ],
)
def test_combinations_that_are_refused(folder, tmp_path, flags, message):  # noqa: F811
    with pytest.raises(ValueError, match=message):
        run(folder, tmp_path / "out", *ONE, "--token_weights", "prpo", *flags)


# --- runs ---------------------------------------------------------------------------------------------------


def weights_of(trainer) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in trainer.model.parameters()]


def test_weights_of_one_are_plain_grpo_to_the_bit(folder, tmp_path):  # noqa: F811
    plain = run(folder, tmp_path / "plain", *ONE)
    flags = (*ONE, "--token_weights", "prpo")
    weighed = run(folder, tmp_path / "ones", *flags, "--token_weight_options", "strength=0")
    assert all(map(torch.equal, weights_of(weighed), weights_of(plain)))
    weighed = run(folder, tmp_path / "prpo", *flags)
    assert not all(map(torch.equal, weights_of(weighed), weights_of(plain)))


def test_a_resumed_run_sees_the_same_views(folder, tmp_path):  # noqa: F811
    """Of two updates a rollout, with a KL term, and with new prompts for groups of equal rewards."""
    more = ("--token_weights", "vppo", "--steps_per_generation", 4, "--beta", 0.1, "--dynamic_sampling", 1)
    more += ("--reward_funcs", "tests.rewards.half_stuck", "--reward_weights", 1, "--save_steps", 2)
    whole = run(folder, tmp_path / "whole", *more, "--max_steps", 4)
    run(folder, tmp_path / "parts", *more, "--max_steps", 2)
    parts = run(folder, tmp_path / "parts", *more, "--max_steps", 4)
    logs = [without_times(lines(tmp_path / name / "logs.jsonl")) for name in ("whole", "parts")]
    assert str(logs[0]) == str(logs[1])  # a NaN is not equal to itself
    assert all(map(torch.equal, weights_of(whole), weights_of(parts)))
    assert 0 < logs[0][0]["token_weights/scored"] <= 1 and logs[0][0]["token_weights/zero"] > 0
