"""A vision tower that is not trained is asked once about an image: its features serve the whole rollout, that
is the prefill, and every row and every update made of it.

Legend
  H  hidden size of the text tower; an image has patches / 4 image tokens
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from .data import Prompt
from .scoring import look_at

PATCHES_AT_ONCE = {"cuda": 65536, "cpu": 8192}


def freeze_vision_tower(policy: nn.Module, dtype: torch.dtype) -> None:
    """Freezes all of `visual`, the merger too, as R1-V and EasyR1 do. It is kept in `dtype`: nothing is added
    to it, so float32 masters would hold nothing that a bf16 file does not."""
    for parameter in policy.model.visual.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)


def vision_is_frozen(policy: nn.Module) -> bool:
    return not any(parameter.requires_grad for parameter in policy.model.visual.parameters())


@torch.no_grad()
def with_image_features(prompts: Sequence[Prompt], visual: nn.Module) -> list[Prompt]:
    """The prompts with what `visual` says of their images, [image tokens, H] each, none for a prompt without.

    They lie on the CPU, as all of a row does until its turn: in bf16 6 MB for 2,000 image tokens of the 2B
    model, a sixth of the pixels, which rows then leave out.
    """
    device, size = visual.get_device(), visual.config.hidden_size
    nothing = torch.zeros(0, size, dtype=visual.get_dtype())
    done = [replace(prompt, image_features=nothing) for prompt in prompts]
    for places in _chunks(prompts, PATCHES_AT_ONCE[device.type]):
        pixels = torch.cat([prompts[i].pixel_values for i in places]).to(device)
        grids = [prompts[i].image_grid_thw for i in places]
        merged = visual.spatial_merge_size**2
        lengths = [int(grid.prod(-1).sum()) // merged for grid in grids]
        features = look_at(visual, pixels, torch.cat(grids)).cpu().split(lengths)
        for i, one in zip(places, features, strict=True):
            done[i] = replace(prompts[i], image_features=one.clone())
    return done


def _chunks(prompts: Sequence[Prompt], most: int) -> Iterator[list[int]]:
    """Places of the prompts with images, as many together as have `most` patches."""
    chunk, patches = [], 0
    for place, prompt in enumerate(prompts):
        if prompt.pixel_values is None:
            continue
        if chunk and patches + len(prompt.pixel_values) > most:
            yield chunk
            chunk, patches = [], 0
        chunk.append(place)
        patches += len(prompt.pixel_values)
    if chunk:
        yield chunk
