"""A frozen vision tower: it is asked once a rollout, and the text tower learns what it would learn anyway."""

import torch

from open_r1.checkpoint import load_policy
from open_r1.frozen_vision import freeze_vision_tower, vision_is_frozen, with_image_features
from open_r1.packing import pack
from open_r1.rollout import FastEngine
from open_r1.sampling import Sampling, sampling_keys
from open_r1.scoring import add_scoring_forward, look_at
from open_r1.views import ImageViews, black_patches
from open_r1.weights import master_weights
from tests.prompts import make_prompts
from tests.test_grpo import folder, lines, run, without_times  # noqa: F401 (folder is a fixture)
from tests.test_packing import gradients, groups, relative  # noqa: F401 (groups is a fixture)
from tests.tiny import tiny_model, tiny_processor


def test_rows_with_features_give_the_text_towers_gradients_and_none_to_the_tower(groups):  # noqa: F811
    plain, frozen = add_scoring_forward(tiny_model()), add_scoring_forward(tiny_model())
    freeze_vision_tower(frozen, torch.float32)
    assert vision_is_frozen(frozen) and not vision_is_frozen(plain)
    prompts = with_image_features([prompt for prompt, _ in groups], frozen.model.visual)
    for prompt in prompts:
        if prompt.pixel_values is not None:  # one by one or together: equal to the bit is not promised
            alone = look_at(frozen.model.visual, prompt.pixel_values, prompt.image_grid_thw)
            assert torch.allclose(prompt.image_features, alone, atol=1e-6)
    row = pack([(prompt, cs) for prompt, (_, cs) in zip(prompts, groups, strict=True)])
    pixels = pack(groups)
    assert row.pixel_values is None and row.image_grid_thw is None
    features = look_at(frozen.model.visual, pixels.pixel_values, pixels.image_grid_thw)
    assert torch.equal(row.image_features, features)
    frozen.model.visual.forward = None  # it is not run
    logps, expected = frozen(**row.model_inputs()), plain(**pixels.model_inputs())
    assert torch.equal(logps, expected)
    weights = torch.randn(logps.numel(), generator=torch.Generator().manual_seed(1))
    got, wanted = gradients(frozen, (logps * weights).sum()), gradients(plain, (expected * weights).sum())
    assert all(p.grad is None for p in frozen.model.visual.parameters())
    text = [name for name in wanted if "visual" not in name]
    assert relative({n: got[n] for n in text}, {n: wanted[n] for n in text}) < 1e-6


def test_one_prompt_without_features_gives_a_row_of_pixels(groups):  # noqa: F811
    """Another view of an image is looked at for itself."""
    model = tiny_model()
    known = with_image_features([prompt for prompt, _ in groups], model.model.visual)
    views = ImageViews(tiny_processor().image_processor, 0, torch.device("cpu"))
    view = views.view(known[0], 0, "destroyed", black_patches)
    assert view.image_features is None
    row = pack([(known[1], []), (view, [])])
    assert row.image_features is None and len(row.pixel_values) == sum(
        len(prompt.pixel_values) for prompt in (known[1], view)
    )


def test_prefill_takes_the_features(monkeypatch):
    model, prompts = tiny_model(), make_prompts()
    engine = FastEngine(model, tiny_processor())
    sampling = Sampling(greedy=False, max_new_tokens=6)
    keys = sampling_keys(0, 0, range(len(prompts)), 2)
    expected = engine.generate(prompts, 2, sampling, keys)
    known = with_image_features(prompts, model.model.visual)
    monkeypatch.setattr(model.model.visual, "forward", None)
    got = engine.generate(known, 2, sampling, keys)
    for a, b in zip(sum(got, []), sum(expected, []), strict=True):
        assert torch.equal(a.token_ids, b.token_ids) and torch.allclose(a.logps, b.logps, atol=1e-5)


FROZEN = ("--freeze_vision_tower", "true", "--optim", "adamw_torch", "--num_iterations", 2, "--beta", 0.1)


def test_a_run_leaves_the_tower_as_it_is_and_is_resumed_to_the_bit(folder, tmp_path):  # noqa: F811
    whole = run(folder, tmp_path / "whole", *FROZEN, "--max_steps", 4, "--save_steps", 2)
    run(folder, tmp_path / "parts", *FROZEN, "--max_steps", 2, "--save_steps", 2)
    parts = run(folder, tmp_path / "parts", *FROZEN, "--max_steps", 4, "--save_steps", 2)
    logs = [without_times(lines(tmp_path / name / "logs.jsonl")) for name in ("whole", "parts")]
    assert logs[0] == logs[1] and logs[0][0]["logps_gap"] < 1e-4
    base = dict(load_policy(folder / "base", torch.float32).named_parameters())
    for (name, a), (_, b) in zip(master_weights(whole.model), master_weights(parts.model), strict=True):
        assert torch.equal(a, b), name
        assert torch.equal(a, base[name]) == ("visual" in name), name
