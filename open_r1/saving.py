"""How a trainer writes a checkpoint that is whole or not there, on any number of ranks, and reads it exactly.

It is written to OUT/.saving, marked, and renamed to OUT/checkpoint-STEP. A write that fails on any rank (a
full disk) ends the save on all of them together; the checkpoints before it stay, and the run goes on. With
LoRA it holds the adapters and their optimizer, and not the base.
"""

import errno
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError

from . import disk
from .checkpoint import fsync, load_policy
from .complete import SAVING, clear_saving, discard, own_checkpoints, prune, publish
from .lora import has_adapters, read_adapters, write_adapters
from .pickles import pickle_stages_by_value
from .ranks import first_of_ranks, on_rank_zero
from .weights import adapter_weights

WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)  # torch reports a full disk as a RuntimeError


class SavesCheckpoints:
    """A part of the Trainer. `run` is the run's id, `checkpoint_size` a checkpoint's expected bytes."""

    run: str | None = None
    checkpoint_size = 0
    checkpoint_failures = 0

    def checkpoint_info(self) -> dict:
        """What else the marker keeps, ready for JSON."""
        return {}

    def _get_output_dir(self, trial) -> str:
        """Where the Trainer puts checkpoint-STEP."""
        return str(Path(self.args.output_dir) / SAVING)

    def _save_checkpoint(self, model, trial) -> None:
        out, step = Path(self.args.output_dir), self.state.global_step
        info = {"step": step, "world_size": self.args.world_size, "run": self.run, **self.checkpoint_info()}
        folder = out / SAVING / f"checkpoint-{step}"
        try:
            on_rank_zero(lambda: self._make_room(out))
            self._write(model, trial)
            on_rank_zero(lambda: self._publish(folder, out, info))
        except OSError as error:  # on all ranks
            self.checkpoint_failures += 1
            with suppress(OSError):
                on_rank_zero(lambda: clear_saving(out))
            if self.args.process_index == 0:
                print(
                    f"update {step}: no checkpoint could be written ({error}); the earlier ones stay and the "
                    f"run goes on. Make room for {self.checkpoint_size / 1e9:.2f} GB in {out}.",
                    flush=True,
                )
            return
        on_rank_zero(lambda: (prune(out, self.run, self.args.checkpoints_kept), clear_saving(out)))

    def _make_room(self, out: Path) -> None:
        """Two whole checkpoints stay where the disk allows, one where it does not."""
        clear_saving(out)
        own = own_checkpoints(out, self.run)
        if own:
            self.checkpoint_size = disk.folder_bytes(own[-1])
        size = self.checkpoint_size
        fault = disk.shortage([(out, size, "a checkpoint")], margin=1)
        if fault and len(own) > 1:
            freed = disk.folder_bytes(own[0])
            fault = disk.shortage([(out, size - freed, "a checkpoint")], margin=1)
            if not fault:
                discard(own[0])
        if fault:
            raise OSError(errno.ENOSPC, fault)

    def _write(self, model, trial) -> None:
        """The Trainer's own save; a write that failed on some rank is raised on all ranks, at its end."""
        errors: list[Exception] = []
        with deferred(errors, self, "_save", "_save_rng_state"), deferred(errors, self.state, "save_to_json"):
            with self._deepspeed_deferred(errors):
                super()._save_checkpoint(model, trial)
        if error := first_of_ranks(f"{type(errors[0]).__name__}: {errors[0]}" if errors else None):
            raise OSError(error)

    @contextmanager
    def _deepspeed_deferred(self, errors: list[Exception]) -> Iterator[None]:
        """DeepSpeed's save is full of barriers: a rank that left it early would leave the others waiting."""
        if not self.is_deepspeed_enabled:
            with deferred(errors, self, "_save_optimizer_and_scheduler"):
                yield
            return
        pickle_stages_by_value()
        engine = self.model_wrapped
        save = engine.save_checkpoint

        def save_then_name(folder: str, **options) -> None:
            save(folder, save_latest=False, exclude_frozen_parameters=has_adapters(self.model), **options)
            if self.args.process_index == 0:
                Path(folder, "latest").write_text(f"global_step{engine.global_steps}")

        with ExitStack() as stack:
            stack.enter_context(deferred(errors, engine.checkpoint_engine, "save", "makedirs"))
            stack.enter_context(deferred(errors, engine, "_copy_recovery_script"))
            engine.save_checkpoint = functools.wraps(save)(save_then_name)
            stack.callback(delattr, engine, "save_checkpoint")
            stack.enter_context(deferred(errors, engine, "save_checkpoint"))
            yield

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if has_adapters(self.model):
            self._save(output_dir, adapter_weights(self.model))
        else:
            super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if not has_adapters(self.model):
            super()._save(output_dir, state_dict)
        elif self.args.should_save:
            write_adapters(self.model, state_dict, Path(output_dir))

    def _publish(self, folder: Path, out: Path, info: dict) -> None:
        """OSError where a file is missing that going on needs: the Trainer would only say so in its log, and
        start afresh with an optimizer and with random numbers of its own."""
        world = self.args.world_size
        needed = ["trainer_state.json"]
        needed += [f"rng_state_{rank}.pth" for rank in range(world)] if world > 1 else ["rng_state.pth"]
        needed += ["latest"] if self.is_deepspeed_enabled else ["optimizer.pt", "scheduler.pt"]
        missing = [name for name in needed if not (folder / name).is_file()]
        states = list(folder.glob("global_step*/*_optim_states.pt"))
        if self.is_deepspeed_enabled and len(states) != world:
            missing.append(f"{world - len(states)} of {world} optimizer states")
        if missing:
            raise OSError(f"{', '.join(missing)} were not written")
        for log in out.glob("*.jsonl"):  # it must hold all lines up to the checkpoint
            fsync(log)
        publish(folder, out, info)

    @torch.no_grad()
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        """The Trainer's own loads the file's names (`visual.…`) into the module's (`model.visual.…`)
        without strictness: nothing arrives, and the run goes on from the base. DeepSpeed restores its
        engine elsewhere."""
        if has_adapters(self.model):
            read_adapters(self.model, Path(resume_from_checkpoint))
            return
        loaded = dict(load_policy(resume_from_checkpoint, torch.float32).named_parameters())
        for name, parameter in self.model.named_parameters():
            parameter.copy_(loaded[name])

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """The state of the checkpoint, and the settings of this run's flags: PyTorch restores the old ones,
        and a learning rate that was changed would do nothing."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or not hasattr(self.lr_scheduler, "lr_lambdas"):  # it follows the scores
            return
        args, scheduler = self.args, self.lr_scheduler
        for number, group in enumerate(self.optimizer.param_groups):
            group["initial_lr"] = args.learning_rate
            group["lr"] = args.learning_rate * scheduler.lr_lambdas[number](scheduler.last_epoch)
            if "betas" in group:
                group |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
            if number == 0:  # the other one is what never decays: biases and norms
                group["weight_decay"] = args.weight_decay
        scheduler.base_lrs = [args.learning_rate] * len(scheduler.base_lrs)


@contextmanager
def deferred(errors: list[Exception], owner: object, *methods: str) -> Iterator[None]:
    """Within it, what these methods of `owner` fail to write goes to `errors` and is not raised."""

    def deferring(method: Callable) -> Callable:
        @functools.wraps(method)
        def call(*args, **kwargs):
            try:
                return method(*args, **kwargs)
            except WRITE_ERRORS as error:
                errors.append(error)

        return call

    replaced = {name: vars(owner).get(name) for name in methods}
    for name in methods:
        setattr(owner, name, deferring(getattr(owner, name)))
    try:
        yield
    finally:
        for name, own in replaced.items():
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
