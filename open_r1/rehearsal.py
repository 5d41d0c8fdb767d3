"""Before the first update, the most that any update may need: a rollout and a validation batch of the longest
prompts, and the longest row forward and backward beside them. Memory fails then, or never; and all that is
compiled on first use is compiled.

Nothing of it stays: neither weights, optimizer, random numbers nor counters change, to the bit.
"""

import time

import torch

from .frozen_vision import with_image_features
from .memory import weights
from .packing import PackedRow
from .protocol import EVAL_TEMPLATE
from .rollout import Completion
from .sampling import sampling_keys
from .training_rows import pack_groups
from .validation import GREEDY

PIECE = 2**30  # bytes of a tensor that only takes the place of what comes later


def rehearse(trainer) -> None:
    """Every rank calls it, before the first rollout. `trainer.longest` names the row with the longest prompt
    of each data set. Raises torch.OutOfMemoryError."""
    args, started = trainer.args, time.perf_counter()
    cuda = args.device.type == "cuda"
    with torch.random.fork_rng(devices=[args.device] if cuda else []):
        decode(trainer)
        row = longest_row(trainer)
        forward_and_backward(trainer, row)
    trainer.engine.drop_batches()
    if cuda:
        torch.cuda.empty_cache()  # the blocks of what was only held for show fit nothing that comes
    if args.process_index == 0:
        peak = f", {torch.cuda.max_memory_reserved() / 2**30:.1f} GiB reserved" if cuda else ""
        print(
            f"rehearsed: a rollout and a row of {row.input_ids.numel():,} tokens, the longest there are, in "
            f"{time.perf_counter() - started:.0f} s{peak}",
            flush=True,
        )


def decode(trainer) -> None:
    """The largest batches; the engine keeps them beside each other, as it does while training."""
    args, engine, stop = trainer.args, trainer.engine, trainer.run_control.interrupted
    prompts = [longest_prompt(trainer)] * (args.prompts_drawn // args.world_size)
    keys = sampling_keys(args.seed, 0, range(len(prompts)), args.completions_drawn)
    engine.generate(prompts, args.completions_drawn, trainer.sampling, keys, stop)
    for name, data in trainer.validation_sets.items():
        prompt = trainer.eval_encoder.encode(data, trainer.longest[name], EVAL_TEMPLATE)
        engine.generate([prompt] * args.per_device_eval_batch_size, 1, GREEDY, None, stop)


def longest_prompt(trainer):
    return trainer.encoder.encode(trainer.train_dataset, trainer.longest["train"], EVAL_TEMPLATE)


def longest_row(trainer) -> PackedRow:
    args = trainer.args
    tokens = torch.arange(args.max_completion_length) % 100  # any but image placeholders
    group = [Completion(tokens, torch.zeros(len(tokens)), True, "")] * args.num_generations
    prompts = [longest_prompt(trainer)] * args.prompts_per_row
    if trainer.vision_is_frozen:
        prompts = with_image_features(prompts, trainer.engine.model.model.visual)
    return pack_groups(prompts, [group] * len(prompts), args.device).to(args.device)


def forward_and_backward(trainer, row: PackedRow) -> None:
    """As rows that are not the last of their update, after which no optimizer steps. Where an update has
    several, a second one finds the gradients of the first."""
    args, accelerator, model = trainer.args, trainer.accelerator, trainer.model_wrapped
    pieces = bytes_to_come(trainer) / PIECE
    ballast = [torch.empty(PIECE, dtype=torch.uint8, device=args.device) for _ in range(round(pieces))]
    model.train()
    accelerator.gradient_state._set_sync_gradients(False)
    with accelerator.no_sync(model), trainer.compute_loss_context_manager():
        for _ in range(min(2, args.gradient_accumulation_steps)):
            loss = model(**row.model_inputs(), temperature=args.temperature).mean()
            accelerator.backward(loss, **({"scale_wrt_gas": False} if trainer.is_deepspeed_enabled else {}))
    accelerator.gradient_state._set_sync_gradients(True)
    del ballast
    drop_gradients(trainer)


def bytes_to_come(trainer) -> int:
    """Of Adam's moments, which are made in the first step; a run that goes on has them."""
    args, optimizer = trainer.args, trainer.optimizer
    if trainer.is_deepspeed_enabled:
        optimizer = trainer.model_wrapped.optimizer.optimizer
    if optimizer.state:
        return 0
    sizes = (getattr(p, "ds_numel", p.numel()) for p in trainer.model.parameters())
    return weights(sum(sizes) - args.adapters, args).get("Adam", 0)


def drop_gradients(trainer) -> None:
    """As if no backward had been."""
    if not trainer.is_deepspeed_enabled:
        trainer.model_wrapped.zero_grad()
        return
    optimizer = trainer.model_wrapped.optimizer
    optimizer.zero_grad()
    sums = getattr(optimizer, "all_grad_tensors", None)
    if sums is not None:  # stages 1 and 2: what their step does with an update that it drops
        optimizer.micro_step_id = -1
        for group in sums:
            optimizer.averaged_gradients[group] = sums[group] = None
