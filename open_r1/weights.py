"""Where the policy's weights go: into the rollout copy after each update, and to the submission in
float32. What adapters (lora.py) add is merged on the way: both are plain models."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from .checkpoint import parameter_name, weight_files
from .lora import plain_parameters, trained, update

GATHERED_AT_ONCE = 2**27  # parameters of one ZeRO-3 gathering: 0.27 GB in bf16


@torch.no_grad()
def copy_weights(policy: nn.Module, copy: nn.Module) -> None:
    """Overwrites `copy` in place, since captured graphs read fixed addresses. A collective under ZeRO-3."""
    into = dict(copy.named_parameters())
    for part in _parts(policy):
        if plain := [(into[name], parameter) for name, parameter, adapter in part if not adapter]:
            _copy_together(*zip(*plain, strict=True))
        if adapted := [one for one in part if one[2]]:
            with _gathered([one for _, parameter, adapter in adapted for one in (parameter, *adapter[:2])]):
                for name, parameter, adapter in adapted:
                    into[name].copy_(parameter.float() + update(*adapter))


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
    keeps them. Adapters are merged in float32.

    A collective under DeepSpeed: all ranks must walk through it to the end.
    """
    for name, parameter, adapter in plain_parameters(policy):
        value = _master(parameter)
        if adapter:
            a, b, scale = adapter
            value = value + update(_master(a), _master(b), scale)
        yield name, value.cpu()


@torch.no_grad()
def adapter_weights(policy: nn.Module) -> dict[str, Tensor]:
    """The adapters in float32 on the CPU. A collective under DeepSpeed."""
    return {name: _master(parameter).cpu() for name, parameter in trained(policy).items()}


def use_leaf_modules(model: nn.Module) -> None:
    """Makes ZeRO-3 gather a whole decoder layer or vision block at once: its cost is Python hooks per
    module."""
    from deepspeed.utils import set_z3_leaf_modules

    visual, text = model.model.visual, model.model.language_model
    set_z3_leaf_modules(model, [type(text.layers[0]), type(visual.blocks[0]), type(visual.merger)])


def _parts(model: nn.Module) -> Iterator[list[tuple[str, nn.Parameter, tuple]]]:
    part, size = [], 0
    for name, parameter, adapter in plain_parameters(model):
        numel = getattr(
            parameter, "ds_numel", parameter.numel()
        )  # a ZeRO-3 shard says how large the whole is
        if part and size + numel > GATHERED_AT_ONCE:
            yield part
            part, size = [], 0
        part.append((name, parameter, adapter))
        size += numel
    yield part


def _copy_together(into: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> None:
    """A few large operations. Of ZeRO-3's shards too, which DeepSpeed gathers with Python for each parameter:
    rank r's begins at entry r * size of the flattened parameter, and the last one's is filled up."""
    if not hasattr(parameters[0], "ds_id"):
        torch._foreach_copy_(into, parameters)
        return
    group = parameters[0].ds_process_group
    shards, ranks = [parameter.ds_tensor for parameter in parameters], torch.distributed.get_world_size(group)
    own = whole = torch.cat([shard.to(into[0].device) for shard in shards])  # [S]
    if ranks > 1:
        whole = own.new_empty(ranks * len(own))  # [ranks * S]
        torch.distributed.all_gather_into_tensor(whole, own, group)
    pieces, sources, start = [], [], 0
    for target, shard in zip(into, shards, strict=True):
        for rank, piece in enumerate(target.view(-1).split(len(shard))):
            pieces.append(piece)
            sources.append(whole[rank * len(own) + start :][: len(piece)])
        start += len(shard)
    torch._foreach_copy_(pieces, sources)


def _gathered(parameters: list[nn.Parameter]):
    if not hasattr(parameters[0], "ds_id"):
        return nullcontext()
    from deepspeed import zero

    return zero.GatheredParameters(parameters)


def _master(parameter: nn.Parameter) -> Tensor:
    """In float32. What is frozen has no other master than itself."""
    if parameter.requires_grad and (hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")):
        from deepspeed.utils import safe_get_full_fp32_param

        return safe_get_full_fp32_param(parameter).detach().float()
    with _gathered([parameter]):
        return parameter.detach().float().clone()
