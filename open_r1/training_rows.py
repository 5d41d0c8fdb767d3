"""Groups of completions with their advantages -> the packed rows that the trainer trains on.

Legend
  R  prompts of this rank's rollout     G  completions a prompt
  C  completions of a row               N  their tokens
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .advantages import token_weights
from .arguments import GRPOArguments
from .data import Prompt
from .packing import PackedRow, pack, padded_length
from .rollout import Completion

Group = Sequence[Completion]


@dataclass
class TrainingRow:
    """A packed row with what its loss needs; every tensor but `rewards` is [N], one value a token."""

    numbers: list[int]  # the data set rows of its prompts
    rewards: Tensor  # [prompts, G], to name them where something is wrong; stays on the CPU
    packed: PackedRow
    advantages: Tensor
    weights: Tensor
    rollout_logps: Tensor
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None

    def to(self, device: torch.device) -> "TrainingRow":
        on_cpu = ("numbers", "rewards")
        return TrainingRow(
            **{k: v if v is None or k in on_cpu else v.to(device) for k, v in vars(self).items()}
        )


def build_rows(
    args: GRPOArguments, prompts: Sequence[Prompt], groups: Sequence[Group], rewards: Tensor,
    advantages: Tensor, sum_over_ranks: Callable[[float], float],
    advantage_weights: Sequence[Tensor] | None = None,
) -> list[TrainingRow]:  # fmt: skip
    """This rank's rows of a rollout, prompts_per_row groups each; rewards and advantages are [R, G]. Per
    update, the tokens and completions of all ranks are the normaliser. Every rank calls it.

    advantage_weights has a tensor for each group: what each of its tokens gets of its advantage.
    """
    per_row, per_update = args.prompts_per_row, args.prompts_per_row * args.gradient_accumulation_steps
    rows = []
    for i in range(0, len(prompts), per_update):
        counted = [
            c.token_ids.numel()
            for group in groups[i : i + per_update]
            for c in group
            if not (args.mask_truncated_completions and c.truncated)
        ]
        tokens = int(sum_over_ranks(float(sum(counted))))
        for j in range(i, i + per_update, per_row):
            part = slice(j, j + per_row)
            weighed = None if advantage_weights is None else advantage_weights[part]
            of_row = prompts[part], groups[part], rewards[part], advantages[part]
            rows.append(_build_row(args, *of_row, tokens, weighed))
    return rows


def _build_row(
    args: GRPOArguments, prompts: Sequence[Prompt], groups: Sequence[Group], rewards: Tensor,
    advantages: Tensor, update_tokens: int, advantage_weights: Sequence[Tensor] | None,
) -> TrainingRow:  # fmt: skip
    """rewards and advantages are [prompts of the row, G]."""
    if not args.beta:
        # A group without variance has no gradient. One stays: every rank runs the same number of rows.
        live = [i for i, group in enumerate(advantages) if group.any()] or [0]
        prompts, groups = [prompts[i] for i in live], [groups[i] for i in live]
        rewards, advantages = rewards[live], advantages[live]
        advantage_weights = advantage_weights and [advantage_weights[i] for i in live]
    completions = [c for group in groups for c in group]
    weights = token_weights(
        torch.tensor([c.token_ids.numel() for c in completions]),  # [C]
        torch.tensor([c.truncated for c in completions]),
        args.loss_type,
        args.max_completion_length,
        bool(args.mask_truncated_completions),
        update_completions=args.prompts_per_update * args.num_generations,
        update_tokens=update_tokens,
    )
    packed = pack_groups(prompts, groups, args.device)
    of_tokens = advantages.flatten()[packed.owners]  # [N]
    if advantage_weights is not None:
        of_tokens = of_tokens * torch.cat(list(advantage_weights))
    return TrainingRow(
        numbers=[prompt.row for prompt in prompts],
        rewards=rewards,
        packed=packed,
        advantages=of_tokens,
        weights=weights[packed.owners],
        rollout_logps=torch.cat([c.logps for c in completions]),
    )


def pack_groups(prompts: Sequence[Prompt], groups: Sequence[Group], device: torch.device) -> PackedRow:
    """One packed row, on the CPU. For a GPU it is filled up to whole blocks."""
    tokens = [[c.token_ids for c in group] for group in groups]
    length = None
    if device.type == "cuda":
        fed = sum(t.numel() - 1 for group in tokens for t in group)
        length = padded_length(sum(p.input_ids.numel() for p in prompts) + fed)
    return pack(list(zip(prompts, tokens, strict=True)), length)
