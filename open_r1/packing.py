"""Groups of completions -> packed rows.

A packed row is [prompt_1 | c_11 .. c_1G | prompt_2 | c_21 .. ] with one rule: a token sees what stands
before it in its own prompt and its own completion. The prompt (and its image) is computed once for its G
completions, nothing is padded, and the result is exact: log-probs and gradients equal those of separate
rows.

Legend
  L  tokens of the row                N  completion tokens of the row (the scored ones)
  C  completions of the row           patches: of all images of the row
  H  hidden size of the text tower
A completion's last token is scored but never fed: nothing stands behind it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import BLOCK, block_kinds
from .data import Prompt

PADDING_GROUP = -1


@dataclass
class PackedRow:
    """One row, batch dimension left out. Everything the model's scoring forward takes."""

    input_ids: Tensor  # [L]
    position_ids: Tensor  # [3, L] M-RoPE; each completion restarts at the end of its prompt
    group_ids: Tensor  # [L] which prompt of the row; PADDING_GROUP for padding
    completion_ids: Tensor  # [L] 0 for the prompt, 1..G for its completions
    sources: Tensor  # [N] index in the row of the hidden state that predicts the target
    targets: Tensor  # [N] completion tokens, completion after completion
    owners: Tensor  # [N] which completion of the row (0..C-1) a target belongs to
    pixel_values: Tensor | None  # [patches, channels * temporal * patch * patch]
    image_grid_thw: Tensor | None  # [images, 3], stays on the CPU: shapes follow from it
    block_kinds: Tensor | None  # [L / BLOCK, L / BLOCK] for FlexAttention, of a padded row
    image_features: Tensor | None = None  # [image tokens, H] in place of pixels, where all prompts have them

    def to(self, device: torch.device | str) -> "PackedRow":
        return replace(
            self,
            **{
                f.name: to_device(getattr(self, f.name), device)
                for f in fields(self)
                if f.name != "image_grid_thw" and getattr(self, f.name) is not None
            },
        )

    def model_inputs(self) -> dict[str, Tensor | None]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "owners"}


def pack(groups: Sequence[tuple[Prompt, Sequence[Tensor]]], length: int | None = None) -> PackedRow:
    """Packs prompts, each with its completions ([T] token ids; none at all for a prefill), into one row.

    `length`, a multiple of BLOCK, pads the row at its end, as FlexAttention wants it.
    """
    ids, positions, group_ids, completion_ids, sources, targets, owners = [], [], [], [], [], [], []
    offset = completions_so_far = 0
    for group, (prompt, completions) in enumerate(groups):
        prompt_length = prompt.input_ids.numel()
        ids.append(prompt.input_ids)
        positions.append(prompt.position_ids)
        completion_ids.append(torch.zeros(prompt_length, dtype=torch.long))
        last_of_prompt = offset + prompt_length - 1
        start, offset = offset, offset + prompt_length
        for number, completion in enumerate(completions, start=1):
            fed = completion.numel() - 1
            ids.append(completion[:-1])
            positions.append((prompt.next_position + torch.arange(fed)).expand(3, -1))  # [3, T-1]
            completion_ids.append(torch.full((fed,), number))
            sources += [torch.tensor([last_of_prompt]), offset + torch.arange(fed)]
            targets.append(completion)
            owners.append(torch.full((fed + 1,), completions_so_far))
            completions_so_far += 1
            offset += fed
        group_ids.append(torch.full((offset - start,), group))
    padding = 0 if length is None else length - offset
    if padding < 0:
        raise ValueError(f"a packed row of {offset} tokens does not fit into {length}")
    group_ids = F.pad(torch.cat(group_ids), (0, padding), value=PADDING_GROUP)
    completion_ids = F.pad(torch.cat(completion_ids), (0, padding))
    features = [prompt.image_features for prompt, _ in groups]
    known = bool(features) and all(one is not None for one in features)
    images = [prompt for prompt, _ in groups if prompt.pixel_values is not None and not known]
    no_tokens = torch.zeros(0, dtype=torch.long)
    return PackedRow(
        input_ids=F.pad(torch.cat(ids), (0, padding)),
        position_ids=F.pad(torch.cat(positions, dim=1), (0, padding)),
        group_ids=group_ids,
        completion_ids=completion_ids,
        sources=torch.cat(sources or [no_tokens]),
        targets=torch.cat(targets or [no_tokens]),
        owners=torch.cat(owners or [no_tokens]),
        pixel_values=torch.cat([p.pixel_values for p in images]) if images else None,
        image_grid_thw=torch.cat([p.image_grid_thw for p in images]) if images else None,
        block_kinds=None if length is None else block_kinds(group_ids, completion_ids),
        image_features=torch.cat(features) if known else None,
    )


def padded_length(tokens: int) -> int:
    """`tokens` rounded up to whole blocks of FlexAttention's mask."""
    return -(-tokens // BLOCK) * BLOCK


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """From pinned memory: a copy from elsewhere waits until the GPU has done what it was given before."""
    if torch.device(device).type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
