"""Which rows a rollout has, and their prompts, encoded ahead of time."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from open_r1.arguments import GRPOArguments
from open_r1.data import CountingData, DataError, Prompt, PromptEncoder


def row_order(num_rows: int, prompts_per_rollout: int, seed: int, rollout: int) -> list[int]:
    """The rows of a rollout. Each epoch is a new permutation, of which no row is left out or repeated.

    A function of its arguments alone, so a resumed run and other numbers of processes draw the same rows.
    """
    places = range(rollout * prompts_per_rollout, (rollout + 1) * prompts_per_rollout)
    epochs = range(places[0] // num_rows, places[-1] // num_rows + 1)
    order = {epoch: np.random.default_rng([seed, epoch]).permutation(num_rows) for epoch in epochs}
    return [int(order[place // num_rows][place % num_rows]) for place in places]


def rollout_rows(args: GRPOArguments, num_rows: int, rollout: int) -> list[int]:
    """The rows of a rollout by place."""
    count = args.prompts_drawn
    if args.shuffle_dataset:
        return row_order(num_rows, count, args.seed, rollout)
    return [i % num_rows for i in range(rollout * count, (rollout + 1) * count)]


def refill_rows(args: GRPOArguments, num_rows: int, rollout: int, attempt: int) -> list[int]:
    """For each place of a rollout the row of attempt 1, 2, ... to replace its prompt: drawn from all rows but
    the rollout's own, the next attempts' others."""
    own = rollout_rows(args, num_rows, rollout)
    others = np.setdiff1d(np.arange(num_rows), own)
    if not len(others):  # no more rows than a rollout has
        others = np.arange(num_rows)
    seed = int(np.random.SeedSequence([args.seed, rollout, 1]).generate_state(1)[0])
    return [int(others[i]) for i in row_order(len(others), len(own), seed, attempt - 1)]


def prompt_places(args: GRPOArguments, count: int) -> list[int]:
    """The places in the rollout of all ranks' prompts, rank after rank, of `count` that are drawn or trained
    on: each update's prompts are cut into equal shares, so that an update has the same prompts on any number
    of ranks."""
    updates = args.prompts_per_rollout // args.prompts_per_update
    places = torch.arange(count).view(updates, args.world_size, -1)
    return places.transpose(0, 1).flatten().tolist()  # [ranks, updates, share]


def rollout_prompts(
    args: GRPOArguments, data: CountingData, encoder: PromptEncoder, rows: Sequence[int],
    drawn_by: Callable[[int], list[int]], first: int,
) -> Iterator[list[Prompt]]:  # fmt: skip
    """This rank's prompts of rollout `first`, `first + 1`, ... of training on `rows`, of which `drawn_by`
    says which a rollout has, by place: decoded ahead of time, each once."""

    def rows_of(number: int) -> list[int]:
        drawn = drawn_by(number)
        return [rows[drawn[i]] for i in prompt_places(args, args.prompts_drawn)]

    return prompt_loader(
        data, encoder, rows_of, start=first, stop=-(-args.max_steps // args.updates_per_rollout),
        rank=args.process_index, world_size=args.world_size, num_workers=args.dataloader_num_workers,
    )  # fmt: skip


def prompt_loader(
    data: CountingData,
    encoder: PromptEncoder,
    rows_of: Callable[[int], Sequence[int]],
    *,
    start: int,
    stop: int,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 2,
) -> Iterator[list[Prompt]]:
    """This rank's prompts of the rollouts start, start + 1, ... stop - 1.

    `rows_of(rollout)` gives the rows of all ranks; each takes its contiguous share. `num_workers` processes
    encode rollouts ahead, each row once; with 0 the caller's own process does, when asked. Raises DataError
    for a row that cannot be encoded, for unequal shares and for too little shared memory.
    """

    def shares() -> Iterator[list[tuple[int, int]]]:
        for rollout in range(start, stop):
            rows = rows_of(rollout)
            share, rest = divmod(len(rows), world_size)
            if rest:
                raise DataError(f"{len(rows)} prompts cannot be shared equally by {world_size} processes")
            yield [(row, rollout) for row in rows[rank * share : (rank + 1) * share]]

    if not num_workers:
        return ([encoder.encode(data, row, step=rollout) for row, rollout in share] for share in shares())
    loader = DataLoader(
        _Rollouts(data, encoder),
        sampler=shares(),
        batch_size=None,  # one share is one item
        num_workers=num_workers,
        prefetch_factor=1,  # a worker is one rollout ahead
        worker_init_fn=leave_process_group,
        generator=torch.Generator(),  # a loader draws a seed, and that must not move training's numbers
    )
    return map(_from_shared, loader)


def leave_process_group(worker: int) -> None:
    """Ctrl-C, or a signal to a group, must not end a worker before the trainer, which finishes its update.

    A worker that ignores the signals would not do: its trainer ends it by SIGTERM, and would wait for ever.
    """
    os.setpgrp()


class _Rollouts(Dataset):
    def __init__(self, data: CountingData, encoder: PromptEncoder):
        self.data, self.encoder = data, encoder

    def __getitem__(self, share: list[tuple[int, int]]) -> tuple[Tensor, list[Prompt]] | DataError:
        try:
            return _to_shared([self.encoder.encode(self.data, row, step=rollout) for row, rollout in share])
        except DataError as error:  # a loader would bury it in a traceback: _from_shared raises it
            return error


# Between processes every tensor takes an open file, and a rollout has hundreds of them: they cross as one.
# (A pipe needs neither files nor shared memory, but took the trainer 0.1 to 0.4 s for 56 MB.)

SHARED_MEMORY = "/dev/shm"
TENSORS = ("input_ids", "position_ids", "image_grid_thw", "pixel_values")


def _to_shared(prompts: list[Prompt]) -> tuple[Tensor, list[Prompt]]:
    """All tensors in one flat uint8 tensor; in the prompts, (first byte, shape, dtype) stands for each."""
    parts, places, length = [], [], 0
    for prompt in prompts:
        place = dict.fromkeys(TENSORS)
        for name in TENSORS:
            tensor = getattr(prompt, name)
            if tensor is not None:
                place[name] = (length, tensor.shape, tensor.dtype)
                parts.append(tensor.flatten().view(torch.uint8))
                length += parts[-1].numel()
        places.append(replace(prompt, **place))
    free = shutil.disk_usage(SHARED_MEMORY).free
    if length > free:  # written all the same, it would end the process with a bus error
        raise DataError(
            f"the images of a rollout take {length >> 20} MiB and {SHARED_MEMORY} has {free >> 20} MiB free: "
            "enlarge it (docker run --shm-size 8g) or set --dataloader_num_workers 0"
        )
    return torch.cat(parts), places


def _from_shared(shared: tuple[Tensor, list[Prompt]] | DataError) -> list[Prompt]:
    if isinstance(shared, DataError):
        raise DataError(str(shared))
    flat, places = shared

    def tensor(place: tuple[int, torch.Size, torch.dtype] | None) -> Tensor | None:
        if place is None:
            return None
        first, shape, dtype = place
        return flat[first : first + shape.numel() * dtype.itemsize].view(dtype).view(shape)

    return [replace(prompt, **{name: tensor(getattr(prompt, name)) for name in TENSORS}) for prompt in places]


def alone(prompt: Prompt) -> Prompt:
    """With tensors of its own: pickled, a part of a rollout's flat tensor would bring all of it along."""
    tensors = {name: getattr(prompt, name) for name in TENSORS}
    return replace(prompt, **{name: one.clone() for name, one in tensors.items() if one is not None})
