"""LoRA: the forward equals peft's, only adapters learn, the merged model is the policy, and a run with it is
resumed and read by peft."""

import pytest
import torch
from peft import PeftModel

from open_r1.arguments import ModelArguments
from open_r1.checkpoint import load_policy
from open_r1.lora import adapters_off, add_adapters, trained, trained_parameters
from open_r1.packing import pack
from open_r1.scoring import add_scoring_forward
from open_r1.weights import copy_weights, master_weights
from tests.prompts import separate_logps
from tests.test_grpo import folder, lines, run, without_times  # noqa: F401 (folder is a fixture)
from tests.test_packing import LENGTHS, gradients, groups, relative  # noqa: F401 (groups is a fixture)
from tests.tiny import tiny_model

TOWERS = {
    "text": ModelArguments(use_peft=True, lora_r=3),
    "both": ModelArguments(use_peft=True, lora_r=3, lora_vision=True, use_rslora=True),
    "few": ModelArguments(use_peft=True, lora_r=3, lora_target_modules=["q_proj", "down_proj"]),
}


def adapted(settings: ModelArguments) -> torch.nn.Module:
    """With adapters that have learned something: B is not 0."""
    model = tiny_model()
    add_adapters(model, settings, seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in trained(model).items():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05, generator=generator)
    return model


def scored(model: torch.nn.Module, groups) -> torch.Tensor:  # noqa: F811
    return model(**pack(groups).model_inputs())


@pytest.mark.parametrize("towers", TOWERS)
def test_forward_and_gradients_are_pefts_and_the_merged_model_is_the_policy(towers, groups):  # noqa: F811
    settings = TOWERS[towers]
    yardstick, policy = adapted(settings), add_scoring_forward(adapted(settings))
    expected = torch.cat([separate_logps(yardstick, prompt, c) for prompt, cs in groups for c in cs])
    weights = torch.randn(expected.numel(), generator=torch.Generator().manual_seed(1))
    logps = scored(policy, groups)
    assert torch.allclose(logps, expected, atol=1e-5)
    ours, pefts = (gradients(m, (x * weights).sum()) for m, x in ((policy, logps), (yardstick, expected)))
    assert relative(ours, pefts) < 1e-5

    # Only adapters learn, and all of those that were asked for.
    shapes = {name: tuple(parameter.shape) for name, parameter in tiny_model().named_parameters()}
    assert trained_parameters(shapes, settings) == sum(p.numel() for p in trained(policy).values())
    assert all(("lora_" in name) == (p.grad is not None) for name, p in policy.named_parameters())
    assert any("visual" in name for name in trained(policy)) == (towers == "both")
    assert all(p.grad.any() for p in trained(policy).values())

    base, merged = add_scoring_forward(tiny_model()), add_scoring_forward(tiny_model(seed=9))
    copy_weights(policy, merged)
    assert (scored(base, groups) - logps).abs().max() > 0.1
    assert torch.allclose(scored(merged, groups), logps, atol=1e-5)
    of_submission = dict(master_weights(policy))
    assert of_submission.keys() == dict(base.named_parameters()).keys()
    assert all(torch.equal(of_submission[name], p) for name, p in merged.named_parameters())
    with torch.no_grad(), adapters_off(policy):
        assert torch.equal(scored(policy, groups), scored(base, groups))
    assert torch.equal(scored(policy, groups), logps) and len(trained(policy)) == len(trained(yardstick))


def test_adapters_are_float32_over_a_bf16_base_and_follow_from_the_seed():
    first, second = tiny_model(dtype=torch.bfloat16), tiny_model(dtype=torch.bfloat16)
    state = torch.get_rng_state()
    add_adapters(first, TOWERS["text"], seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    add_adapters(second, TOWERS["text"], seed=3)
    for (name, a), b in zip(trained(first).items(), trained(second).values(), strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b), name
    assert first.model.language_model.layers[0].mlp.down_proj.weight.dtype == torch.bfloat16


LORA = (
    "--use_peft", "true", "--lora_r", 2, "--lora_alpha", 8, "--beta", 0.1, "--optim", "adamw_torch",
    "--num_iterations", 2,
)  # fmt: skip


def test_a_run_is_resumed_to_the_bit_from_small_checkpoints_that_peft_reads(folder, tmp_path):  # noqa: F811
    whole = run(folder, tmp_path / "whole", *LORA, "--max_steps", 4, "--save_steps", 2)
    assert whole.ref_model is None
    run(folder, tmp_path / "parts", *LORA, "--max_steps", 2, "--save_steps", 2)
    parts = run(folder, tmp_path / "parts", *LORA, "--max_steps", 4, "--save_steps", 2)
    outs = tmp_path / "whole", tmp_path / "parts"
    logs, rollouts = ([lines(out / f"{kind}.jsonl") for out in outs] for kind in ("logs", "rollouts"))
    assert without_times(logs[0]) == without_times(logs[1]) and rollouts[0] == rollouts[1]
    for (name, a), (_, b) in zip(master_weights(whole.model), master_weights(parts.model), strict=True):
        assert torch.equal(a, b), name
    first, *_, last = without_times(logs[0])
    assert first["kl"] == 0 and last["kl"] > 0 and first["logps_gap"] < 1e-4

    checkpoint = tmp_path / "whole/checkpoint-4"
    sizes = [(checkpoint / name).stat().st_size for name in ("adapter_model.safetensors", "optimizer.pt")]
    assert sum(sizes) < 12 * sum(p.numel() for p in trained(whole.model).values()) + 50_000
    assert not list(checkpoint.glob("model*.safetensors"))
    with pytest.raises(ValueError, match="is a LoRA adapter"):
        load_policy(checkpoint, torch.float32)
    by_peft = PeftModel.from_pretrained(load_policy(folder / "base", torch.float32), checkpoint)
    values = dict(master_weights(whole.model))
    for name, parameter in by_peft.merge_and_unload().named_parameters():
        assert torch.allclose(parameter, values[name], atol=1e-6), name
