"""Where the policy's weights go: into the rollout copy after each update, and to the submission in
float32."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from .checkpoint import parameter_name, weight_files

GATHERED_AT_ONCE = 2**27  # parameters of one ZeRO-3 gathering: 0.27 GB in bf16


@torch.no_grad()
def copy_weights(policy: nn.Module, copy: nn.Module) -> None:
    """Overwrites `copy` in place, since captured graphs read fixed addresses. A collective under ZeRO-3."""
    into = dict(copy.named_parameters())
    for part in _parts(policy):
        with _gathered([parameter for _, parameter in part]):
            for name, parameter in part:
                into[name].copy_(parameter)


@torch.no_grad()
def load_weights(model: nn.Module, folder: Path) -> None:
    """Overwrites a whole model in place by the weights of a checkpoint that load_policy has loaded before,
    one tensor in memory at a time."""
    into = dict(model.named_parameters())
    for file in weight_files(folder):
        with safe_open(folder / file, framework="pt") as tensors:
            for name in tensors.keys():
                if parameter_name(name) in into:  # a tied head in a file is the embedding once more
                    into[parameter_name(name)].copy_(tensors.get_tensor(name))


@torch.no_grad()
def master_weights(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by name, in float32 on the CPU, one at a time: DeepSpeed's float32 masters where it
    keeps them.

    A collective under DeepSpeed: all ranks must walk through it to the end.
    """
    for name, parameter in policy.named_parameters():
        yield name, _master(parameter).detach().float().cpu()


def use_leaf_modules(model: nn.Module) -> None:
    """Makes ZeRO-3 gather a whole decoder layer or vision block at once: its cost is Python hooks per
    module."""
    from deepspeed.utils import set_z3_leaf_modules

    visual, text = model.model.visual, model.model.language_model
    set_z3_leaf_modules(model, [type(text.layers[0]), type(visual.blocks[0]), type(visual.merger)])


def _parts(model: nn.Module) -> Iterator[list[tuple[str, nn.Parameter]]]:
    part, size = [], 0
    for name, parameter in model.named_parameters():
        numel = getattr(
            parameter, "ds_numel", parameter.numel()
        )  # a ZeRO-3 shard says how large the whole is
        if part and size + numel > GATHERED_AT_ONCE:
            yield part
            part, size = [], 0
        part.append((name, parameter))
        size += numel
    yield part


def _gathered(parameters: list[nn.Parameter]):
    if not hasattr(parameters[0], "ds_id"):
        return nullcontext()
    from deepspeed import zero

    return zero.GatheredParameters(parameters)


def _master(parameter: nn.Parameter) -> Tensor:
    if not (hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")):
        return parameter
    from deepspeed.utils import safe_get_full_fp32_param

    return safe_get_full_fp32_param(parameter)
