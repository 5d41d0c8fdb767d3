"""The rollout copy is brought up to date from shards."""

import pytest
import torch
from torch import nn

from open_r1 import weights


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_are_put_together(ranks, dtype, monkeypatch):
    """Of parameters whose size the ranks do not divide, too; the shards are of another type than the copy."""
    monkeypatch.setattr(weights, "GATHERED_AT_ONCE", 40)  # several gatherings
    policy = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1, bias=False), nn.Linear(1, 1))
    copy = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1, bias=False), nn.Linear(1, 1)).to(dtype)
    shards = []  # of each parameter, [rank, size]
    for parameter in policy.parameters():
        size = -(-parameter.numel() // ranks)
        filled = torch.full((ranks * size,), torch.nan)
        filled[: parameter.numel()] = parameter.detach().flatten()
        shards.append(filled.view(ranks, size))
        parameter.ds_id, parameter.ds_process_group, parameter.ds_numel = 0, None, parameter.numel()
        parameter.ds_tensor = shards[-1][0]
    expected = {name: parameter.detach().to(dtype) for name, parameter in policy.named_parameters()}
    seen = 0

    def gather(whole, own, group):
        nonlocal seen
        part, size = [], 0
        while size < len(own):
            part.append(shards[seen])
            size, seen = size + part[-1].shape[1], seen + 1
        whole.copy_(torch.cat(part, 1).flatten())

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: ranks)
    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", gather)
    weights.copy_weights(policy, copy)
    assert all(torch.equal(value, expected[name]) for name, value in copy.named_parameters())
