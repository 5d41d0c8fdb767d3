"""Runs open_r1/grpo.py's main() in one of several processes on the CPU and saves the gradients of each
update.

    torchrun --nproc_per_node 2 tests/distributed_worker.py {ddp|zero} GRADIENTS.pt FLAGS…

accelerate has no CPU path for DeepSpeed: a state that is made first with gloo gives it one.
FAULT=RANK:ROW:WHAT in the environment: in that row (counted from 1) that rank's loss is not a number (nan),
or that rank has no memory left (oom), or gets a signal (SIGTERM, SIGKILL, ...).
"""

import os
import signal
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def start_deepspeed_on_cpu() -> None:
    import deepspeed.ops
    from accelerate import PartialState

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # plain gloo, not a C++ build of a minute
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")


def count_gathers_of(head, parameters, count: list[int]) -> None:
    """Counts how often ZeRO-3 gathers `head`: any parameter's method may be asked to gather a list."""

    def counting(own, original):
        def gather(*args, **kwargs):
            listed = args[0] if args else kwargs.get("param_list") or [own]
            count[0] += any(one is head for one in listed)
            return original(*args, **kwargs)

        return gather

    for parameter in parameters:
        for member in ("all_gather", "all_gather_coalesced"):
            setattr(parameter, member, counting(parameter, getattr(parameter, member)))


def kept_dtypes(optimizer) -> tuple[set, set]:
    """Of DeepSpeed's master weights, and of the gradients that it has summed up when it steps."""
    masters = getattr(optimizer, "fp32_partitioned_groups_flat", None)  # stage 3
    masters = masters or optimizer.single_partition_of_fp32_groups
    summed = [grad for grads in optimizer.averaged_gradients.values() for grad in grads or ()]
    summed += [flat.grad for flat in masters if flat.grad is not None]  # offloaded
    return {flat.dtype for flat in masters}, {grad.dtype for grad in summed}


def make_fault(trainer_module, fault: str) -> None:
    rank, row, what = fault.split(":")
    original, rows = trainer_module.grpo_loss, [0]

    def loss(*args):
        rows[0] += 1
        value, sums = original(*args)
        if os.environ.get("RANK", "0") == rank and rows[0] == int(row):
            if what == "nan":
                return value * float("nan"), sums
            if what == "oom":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            os.kill(os.getpid(), signal.Signals[what])
        return value, sums

    trainer_module.grpo_loss = loss


def fill_disk_once() -> None:
    """The first file that this rank saves does not fit."""
    save = torch.save

    def fail(*args, **kwargs):
        torch.save = save
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    torch.save = fail


def main() -> None:
    kind, path = sys.argv[1], Path(sys.argv[2])
    del sys.argv[1:3]
    if kind == "zero":
        start_deepspeed_on_cpu()
        sys.argv += ["--accelerator_config", '{"use_configured_state": true}']

    from transformers import TrainerCallback

    from open_r1 import grpo, scoring
    from open_r1 import trainer as trainer_module
    from open_r1.weights import master_weights

    trainers, updates, dtypes, images, head_gathered, gathered_now = [], [], [], [], [], [0]

    class Watch(TrainerCallback):
        """Gradients of all ranks together, before clipping."""

        def on_train_begin(self, args, state, control, **kwargs):
            if kind == "zero":  # DeepSpeed steps inside backward(): look before it does
                from deepspeed.utils import safe_get_full_grad

                engine = trainers[0].model_wrapped
                step = engine.step

                def keep_then_step(*a, **k):
                    updates.append({n: safe_get_full_grad(p).float().clone() for n, p in named()})
                    dtypes.append(kept_dtypes(engine.optimizer))
                    return step(*a, **k)

                engine.step = keep_then_step
                scoring.LOGITS_CHUNK = 4
                model = trainers[0].model
                if engine.zero_optimization_stage() == 3:
                    count_gathers_of(model.lm_head.weight, model.parameters(), gathered_now)

        def on_step_end(self, args, state, control, **kwargs):
            head_gathered.append(gathered_now[0])
            gathered_now[0] = 0

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if kind != "zero":
                updates.append({n: p.grad.clone() for n, p in named()})

    def named():
        return [(n, p) for n, p in trainers[0].model.named_parameters() if p.requires_grad]

    class Trainer(grpo.Qwen2VLGRPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.add_callback(Watch())
            trainers.append(self)

        def compute_loss(self, model, inputs, *args, **kwargs):
            grid = inputs.packed.image_grid_thw
            images.append(0 if grid is None else len(grid))
            return super().compute_loss(model, inputs, *args, **kwargs)

    grpo.Qwen2VLGRPOTrainer = Trainer
    if "FAULT" in os.environ:
        make_fault(trainer_module, os.environ["FAULT"])
    if os.environ.get("FULL_DISK") == os.environ.get("RANK", "0"):
        fill_disk_once()
    leave = grpo.leave_together

    def save() -> None:
        trainer = trainers[0]
        masters = dict(master_weights(trainer.model))
        rope = trainer.model.model.language_model.rotary_emb.inv_freq
        if trainer.args.process_index == 0:
            result = {"gradients": updates, "masters": masters, "rope": rope.clone(), "dtypes": dtypes}
            result["images"] = images  # of the rows of rank 0
            result |= {"head_gathered": head_gathered, "best": trainer.keep_best.best_score}
            torch.save(result, path)

    def save_and_leave(code: int = 0) -> None:
        save()
        leave(code)

    if kind == "ddp":  # a run that stopped has values too, where no other rank is asked for them
        grpo.leave_together = save_and_leave
    grpo.main()
    save_and_leave()


if __name__ == "__main__":
    main()
