"""The same model, completions and rewards through TRL's GRPOTrainer and through ours: same loss, same
gradients."""

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from open_r1.arguments import GRPOArguments
from open_r1.checkpoint import load_policy
from open_r1.data import PromptEncoder, load_rows
from open_r1.processor import load_processor
from open_r1.protocol import EVAL_TEMPLATE
from open_r1.rewards import RewardCaller, resolve_rewards
from open_r1.rollout import Engine
from open_r1.sampling import Sampling
from open_r1.trainer import Qwen2VLGRPOTrainer
from tests.tiny import EOS, noise_image, save_public_form

PROMPTS, GENERATIONS, MAX_LENGTH = 4, 4, 9
SIZES = [(84, 56), (56, 112), (140, 84), (64, 60)]


def completion_for(prompt_ids: list[int], number: int) -> list[int]:
    """Some completion of 1 to 9 tokens; most end with the end token, some are cut off at the full length."""
    generator = torch.Generator().manual_seed(sum(i * t for i, t in enumerate(prompt_ids)) + number)
    length = 1 + int(torch.randint(MAX_LENGTH, (1,), generator=generator))
    tokens = torch.randint(32, 127, (length,), generator=generator).tolist()
    return tokens if length == MAX_LENGTH else [*tokens[:-1], EOS]


def letters(completion_ids, **kwargs):
    """A reward that differs within most groups."""
    return [sum(ids) % 7 / 7 for ids in completion_ids]


class Scripted(Engine):
    """A rollout engine that says what the test wants."""

    def generate(self, prompts, num_generations, sampling: Sampling, keys=None, interrupted=None):
        return [
            [
                self.completion(
                    torch.tensor(completion_for(p.input_ids.tolist(), i)), torch.zeros(MAX_LENGTH)
                )
                for i in range(num_generations)
            ]
            for p in prompts
        ]


class Gradients(TrainerCallback):
    """The gradients of each update, before clipping (which is off)."""

    def __init__(self):
        self.updates = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.updates.append(
            {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
        )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("parity")
    save_public_form(root / "base", seed=0)
    data = Dataset.from_dict(
        {
            "image": [noise_image(i, *size) for i, size in enumerate(SIZES)],
            "problem": [f"How many of kind {'x' * i}?" for i in range(PROMPTS)],
            "solution": [str(i) for i in range(PROMPTS)],
        }
    )
    data.save_to_disk(root / "rows")
    return root


def settings(out, **more) -> dict:
    return {
        "output_dir": str(out), "num_generations": GENERATIONS, "max_completion_length": MAX_LENGTH,
        "max_steps": 1, "gradient_accumulation_steps": PROMPTS, "learning_rate": 1e-3, "optim": "sgd",
        "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "beta": 0.0, "loss_type": "dapo",
        "logging_steps": 1, "save_strategy": "no", "use_cpu": True, "bf16": False, "report_to": "none",
        "gradient_checkpointing": False, "seed": 1, "temperature": 1.0, "use_bias_correction_kl": False,
        **more,
    }  # fmt: skip


def run_trl(folders, out, **more):
    class Fixed(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations):
            return [completion_for(list(ids), i % num_generations) for i, ids in enumerate(prompt_ids)], None

    rows = load_rows(folders / "rows")
    data = Dataset.from_dict(
        {
            "prompt": [
                [{"role": "user", "content": EVAL_TEMPLATE.format(question=rows.columns(i)["question"])}]
                for i in range(PROMPTS)
            ],
            "image": [rows.images(i)[0] for i in range(PROMPTS)],
        }
    )
    config = GRPOConfig(
        per_device_train_batch_size=GENERATIONS,
        model_init_kwargs={"dtype": "float32"},
        **settings(out, **more),
    )
    watch = Gradients()
    trainer = Fixed(
        str(folders / "base"),
        letters,
        config,
        data,
        processing_class=load_processor(folders / "base"),
        callbacks=[watch],
    )
    trainer.train()
    return watch.updates, [log["loss"] for log in trainer.state.log_history if "loss" in log]


def run_ours(folders, out, prompts_per_row=1, **more):
    more = {"gradient_accumulation_steps": PROMPTS // prompts_per_row} | more
    args = GRPOArguments(prompts_per_row=prompts_per_row, eval_strategy="no", **settings(out, **more))
    processor = load_processor(folders / "base")
    policy, copy = (load_policy(folders / "base", torch.float32) for _ in range(2))
    encoder = PromptEncoder(processor, policy.config, prompt_mix=0.0, keep_images=False, seed=0)
    watch = Gradients()
    trainer = Qwen2VLGRPOTrainer(
        policy, args, processor, Scripted(copy, processor), load_rows(folders / "rows"), range(PROMPTS),
        encoder, RewardCaller(resolve_rewards(["letters"], None, {"letters": letters}), 0), {}, encoder,
        ref_model=load_policy(folders / "base", torch.float32) if args.beta else None, callbacks=[watch],
    )  # fmt: skip
    trainer.train()
    return watch.updates, [log["loss"] for log in trainer.state.log_history if "loss" in log]


def assert_same(ours, trl, tolerance=1e-5):
    assert len(ours[0]) == len(trl[0]) > 0
    for a, b in zip(ours[0], trl[0], strict=True):
        assert a.keys() == b.keys()
        difference = sum((a[n] - b[n]).square().sum() for n in b).sqrt()
        norm = sum(value.square().sum() for value in b.values()).sqrt()
        assert norm > 0 and difference / norm < tolerance
    assert ours[1] == pytest.approx(trl[1], rel=tolerance, abs=1e-6)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize(
    "more", [{}, {"beta": 0.04, "scale_rewards": "none", "mask_truncated_completions": True}]
)
def test_same_loss_and_gradients(folders, tmp_path, loss_type, more):
    assert_same(
        run_ours(folders, tmp_path, loss_type=loss_type, **more),
        run_trl(folders, tmp_path, loss_type=loss_type, **more),
    )


@pytest.mark.parametrize("prompts_per_row", [2, 4])
def test_rows_of_several_groups_change_nothing(folders, tmp_path, prompts_per_row):
    more = {"loss_type": "grpo", "scale_rewards": "batch", "beta": 0.04, "use_bias_correction_kl": True}
    assert_same(run_ours(folders, tmp_path, prompts_per_row, **more), run_trl(folders, tmp_path, **more))


SEQUENCE = {"importance_sampling_level": "sequence", "epsilon": 0.01, "epsilon_high": 0.02}


@pytest.mark.parametrize(
    "more",
    [
        {"epsilon": 0.1},
        {"epsilon": 0.1, "beta": 0.04, "temperature": 0.8},
        SEQUENCE | {"loss_type": "grpo"},
        SEQUENCE | {"beta": 0.04, "use_bias_correction_kl": True},
    ],
)
def test_second_iteration_is_off_policy_and_clipped(folders, tmp_path, more):
    """Two updates on one rollout: the second has ratios away from 1 (a large step), clipped
    asymmetrically, and a KL term that is not 0."""
    more = {"epsilon_high": 0.3, "num_iterations": 2, "max_steps": 2, "learning_rate": 0.05} | more
    assert_same(run_ours(folders, tmp_path, **more), run_trl(folders, tmp_path, **more), tolerance=1e-4)
