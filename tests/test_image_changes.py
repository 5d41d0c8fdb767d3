"""Images that training changes: --augment for rollout and update, --noisy_rollout for half of a group."""

import colorsys
import json
import random

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from open_r1 import rolling_out
from open_r1.arguments import ModelArguments, RecipeArguments
from open_r1.augment import augmented
from open_r1.check_args import check_args
from open_r1.data import PromptEncoder
from open_r1.noisy_rollout import DEVIATIONS, NoisyRollout, deviation
from open_r1.rollout import FastEngine
from open_r1.run_identity import defining_flags
from open_r1.sampling import Sampling, sampling_keys
from open_r1.trainer import Qwen2VLGRPOTrainer
from tests.prompts import _OneRow, make_prompts, separate_logps
from tests.test_base_rl import arguments, drawn_in
from tests.test_distributed import PROMPTS, assert_same_updates, launch
from tests.test_distributed import folder as two_ranks  # noqa: F401
from tests.test_grpo import FLAGS, folder, lines, parse, run, without_times  # noqa: F401
from tests.tiny import tiny_config, tiny_model, tiny_processor

# CLEVR's colours, but for gray, which has no hue.
COLOURS = [(173, 35, 35), (42, 75, 215), (29, 105, 20), (129, 74, 25), (129, 38, 192), (41, 208, 208),
           (255, 238, 51)]  # fmt: skip
GROUND = (150, 150, 150)


def scene() -> Image.Image:
    """A row of squares, large and small in turn, the first at the very edge."""
    image = Image.new("RGB", (320, 120), GROUND)
    draw = ImageDraw.Draw(image)
    for i, colour in enumerate(COLOURS):
        size = 30 if i % 2 else 20
        draw.rectangle([44 * i, 40, 44 * i + size, 40 + size], fill=colour)
    return image


def squares(image: Image.Image) -> list[tuple[float, float]]:
    """(hue in degrees, width) of each thing, from left to right."""
    pixels = np.asarray(image).astype(float)
    colourful = pixels.max(2) - pixels.min(2) > 40  # [height, width]
    columns, found, start = [*(colourful.sum(0) > 9), False], [], None  # JPEG leaves specks at edges
    for x, on in enumerate(columns):
        if on and start is None:
            start = x
        elif not on and start is not None:
            middle = pixels[:, (start + x) // 2][colourful[:, (start + x) // 2]]
            found.append((360 * colorsys.rgb_to_hsv(*np.median(middle, 0) / 255)[0], x - start))
            start = None
    return found


def test_counts_places_sizes_and_hues_stay_true():
    before, changed = squares(scene()), 0
    assert len(before) == len(COLOURS)
    for seed in range(60):
        image = augmented(scene(), random.Random(seed))
        assert image.size == (320, 120) and image.mode == "RGB"
        changed += not np.array_equal(np.asarray(image), np.asarray(scene()))
        after = squares(image)
        assert len(after) == len(before)
        for (hue, width), (hue_before, width_before) in zip(after, before, strict=True):
            assert abs((hue - hue_before + 180) % 360 - 180) < 12  # CLEVR's nearest two are 22 apart
            assert 0.85 * width_before - 3 < width < width_before + 5
        assert min(width for _, width in after[1::2]) > max(width for _, width in after[::2])
    assert 50 < changed < 60


def encoder(augment: bool) -> PromptEncoder:
    return PromptEncoder(
        tiny_processor(), tiny_config(), prompt_mix=0.0, keep_images=True, seed=3, augment=augment
    )


def test_an_image_is_changed_by_seed_row_and_rollout():
    row = _OneRow("How many?", [scene()])
    plain, *others = (encoder(False).encode(row, 5, step=step) for step in (0, 0, 1))
    assert all(torch.equal(plain.pixel_values, other.pixel_values) for other in others)
    drawn = ((5, 1), (5, 1), (5, 2), (6, 1))  # row, rollout
    changed = [encoder(True).encode(row, number, step=step) for number, step in drawn]
    same = [torch.equal(changed[0].pixel_values, other.pixel_values) for other in changed]
    assert same == [True, True, False, False] and not torch.equal(plain.pixel_values, changed[0].pixel_values)
    assert torch.equal(plain.input_ids, changed[0].input_ids)
    assert changed[0].images[0].tobytes() != scene().tobytes()  # a reward sees what the policy saw


# --- noise --------------------------------------------------------------------------------------------------


def test_the_schedule_is_the_papers():
    expected = {100: 0.058, 200: 0.110, 250: 0.147, 300: 0.194, 400: 0.327, 450: 0.413, 500: 0.505}
    assert [DEVIATIONS[step] for step in expected] == pytest.approx(list(expected.values()), abs=1.5e-3)
    first = float(DEVIATIONS[499])  # after 500 steps
    got = [deviation(first, k / 60) for k in (0, 20, 30, 40, 50)]
    assert got == pytest.approx([DEVIATIONS[n - 1] for n in (499, 499, 496, 250, 3)], abs=1.5e-3)
    assert deviation(first, 1.0) == 0 and deviation(0.95, 0.0) == pytest.approx(0.95, abs=2e-3)


def noisy(**more) -> NoisyRollout:
    args = arguments(noisy_rollout=0.5, max_steps=60, **more)
    return NoisyRollout(args, FastEngine(tiny_model(), tiny_processor()), tiny_processor().image_processor)


def test_half_of_a_group_answers_the_noised_image():
    """The clean half is what a run without noise draws; the other's log-probs are those of the noised image,
    which is one and the same for it."""
    prompts, sampling, one = make_prompts(), Sampling(False, 8), noisy()
    keys = sampling_keys(1, 0, range(4), 4)
    plain = one.engine.generate(prompts, 4, sampling, keys)
    groups = one.generate(0, prompts, 4, sampling, keys)
    model = tiny_model()
    for prompt, group, before in zip(prompts, groups, plain, strict=True):
        assert [c.text for c in group[:2]] == [c.text for c in before[:2]]
        seen = one.noised(prompt, 0, one.noise(0))
        for i, c in enumerate(group):
            for view, is_it in ((prompt, i < 2), (seen, i >= 2)):
                with torch.no_grad():
                    close = torch.allclose(separate_logps(model, view, c.token_ids), c.logps, atol=1e-3)
                assert close == (is_it or prompt.pixel_values is None)
    last = one.generate(60, prompts, 4, sampling, keys)  # no noise is left
    assert [[c.text for c in group] for group in last] == [[c.text for c in group] for group in plain]


def test_noise_is_as_strong_as_it_says():
    one, (prompt, *_) = noisy(), make_prompts([("How many?", [(280, 280)])])
    gray = torch.zeros_like(prompt.pixel_values)  # the mean colour: hardly anything is clamped
    prompt.pixel_values = gray
    seen = one.noised(prompt, 0, 0.1)
    deviations = torch.tensor(tiny_processor().image_processor.image_std)
    patches = seen.pixel_values.view(-1, 3, 2, 14 * 14)
    assert torch.equal(patches[:, :, 0], patches[:, :, 1])  # both frames of a still image
    assert torch.allclose(patches.std((0, 2, 3)) * deviations, torch.full((3,), 0.1), rtol=0.02)
    assert torch.equal(one.noised(prompt, 0, 0.1).pixel_values, seen.pixel_values)
    assert not torch.equal(one.noised(prompt, 1, 0.1).pixel_values, seen.pixel_values)


MORE = ("--noisy_rollout", 0.5, "--augment", "true", "--save_steps", 2, "--kl_readout_steps", 2)


def test_updates_are_on_the_clean_image_and_a_resumed_run_makes_the_same(folder, tmp_path, monkeypatch):  # noqa: F811
    """Two updates a rollout: old log-probs are of the clean image, so ratios begin at 1."""
    encoded, trained, stop_at = {}, [], []
    encode, loss = PromptEncoder.encode, Qwen2VLGRPOTrainer.compute_loss

    def watched(self, data, row, template=None, step=0):
        prompt = encode(self, data, row, template, step)
        encoded[step, row] = prompt.pixel_values
        return prompt

    def compute_loss(self, model, row, **kwargs):
        if self.state.global_step in stop_at:
            raise RuntimeError("stopped by the test")
        with torch.no_grad():
            now = model(**row.packed.model_inputs())
        trained.append((self.state.global_step, row, (now - row.old_logps).abs().max()))
        return loss(self, model, row, **kwargs)

    def kl_to_base(trainer, base, prompts, groups):
        assert all(len(group) == 2 for group in groups)  # the clean half of four
        return {"kl_to_base": 0.5}

    monkeypatch.setattr(rolling_out, "kl_to_base", kl_to_base)
    monkeypatch.setattr(PromptEncoder, "encode", watched)
    monkeypatch.setattr(Qwen2VLGRPOTrainer, "compute_loss", compute_loss)
    more = (*MORE, "--steps_per_generation", 4, "--learning_rate", 1e-2, "--optim", "sgd")
    trainer = run(folder, tmp_path / "whole", *more, "--max_steps", 4)
    assert trainer.encoder.augment and not trainer.eval_encoder.augment
    flags = defining_flags(RecipeArguments(), trainer.args, ModelArguments())
    assert flags["max_steps"] == 4  # the noise falls by it
    for step, row, ratio in trained:
        pixels = encoded[step // 2, row.numbers[0]]
        if pixels is not None:
            assert torch.equal(row.packed.pixel_values.cpu(), pixels)
            assert (row.old_logps - row.rollout_logps).abs().max() > 1e-2 or step > 2  # little noise
        if step % 2 == 0:
            assert ratio < 1e-4
    logs = [log for log in lines(tmp_path / "whole/logs.jsonl") if "loss" in log]
    assert all(log["kl_to_base"] == 0.5 for log in logs)
    noise = [log["noisy_rollout/noise"] for log in logs]
    assert noise[0] == noise[1] > 0.49 and noise[2] == noise[3] == pytest.approx(deviation(0.5, 0.5))
    halves = [(log["noisy_rollout/reward_clean"] + log["noisy_rollout/reward_noised"]) / 2 for log in logs]
    assert halves == pytest.approx([log["reward"] for log in logs], abs=1e-6)

    stop_at.append(2)
    with pytest.raises(RuntimeError, match="stopped by the test"):
        run(folder, tmp_path / "parts", *more, "--max_steps", 4)
    stop_at.clear()
    run(folder, tmp_path / "parts", *more, "--max_steps", 4)
    for read in (drawn_in, lambda out: without_times(lines(out / "logs.jsonl"))):
        assert read(tmp_path / "parts") == read(tmp_path / "whole")


ALL = (
    "--bf16", "false", "--oversample", 1.5, "--difficulty_sampling", "true", "--count_balance", 0.5,
    "--noisy_rollout", 0.5, "--augment", "true", "--steps_per_generation", "--save_strategy", "steps",
    "--save_steps", 2, "--max_steps", 4, "--reward_funcs", "tests.rewards.half_stuck",
    "--kl_readout_steps", 2,
)  # fmt: skip


def test_two_ranks_draw_keep_and_train_on_the_same(two_ranks):  # noqa: F811
    """Of rollouts of 12 prompts for two updates of 4; groups change ranks."""
    names, made = ("one_all", "two_all"), []
    for name, processes in zip(names, (1, 2), strict=True):
        flags = [*ALL]
        flags.insert(flags.index("--steps_per_generation") + 1, 2 * PROMPTS // processes)
        made.append(launch(two_ranks, name, "ddp", processes, *flags))
    assert_same_updates(made[1], made[0], updates=4)
    markers = [json.loads((two_ranks / d / "checkpoint-4/COMPLETE").read_text()) for d in names]
    rates = [
        {rollout: sorted(groups) for rollout, groups in marker["pass_rates"].items()} for marker in markers
    ]
    assert rates[0] == rates[1] and [len(groups) for groups in rates[0].values()] == [12, 12]


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (("--noisy_rollout", 1.0), "--noisy_rollout 1: .* set 0"),
        (("--noisy_rollout", "nan"), "--noisy_rollout nan"),
        (("--noisy_rollout", 0.5, "--num_generations", 5), "half of each group is noised; set an even"),
        (("--noisy_rollout", 0.5, "--vote_generations", 16), "leave out --vote_generations"),
        (("--noisy_rollout", 0.5, "--token_weights", "vppo"), "0.5 with --token_weights vppo"),
    ],
)
def test_refused(flags, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_args(*parse(*FLAGS, *flags))
