"""Qwen2VLGRPOTrainer: a transformers.Trainer whose train data are its own rollouts.

    prompts -> rollout copy generates groups -> rewards -> advantages -> packed rows -> Trainer's own update

The Trainer asks its data loader for the rows of an update; the loader rolls out when it has none left.
Everything that depends on the update as a whole (advantages, token counts) is fixed there, over all ranks,
so that a row's loss needs no knowledge of the other rows.

Legend
  N  completion tokens of a row
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import Trainer

from . import validation
from .advantages import LossSettings, grpo_loss
from .arguments import GRPOArguments
from .collapse_watch import CollapseWatch, difference_error
from .complete import complete_marker
from .control import RunControl, StopRun
from .data import CountingData, PromptEncoder
from .data_loader import rollout_prompts
from .finite import FiniteWatch
from .frozen_vision import vision_is_frozen
from .keep_best import KeepBest, numbers_of
from .metrics import means
from .noisy_rollout import NoisyRollout
from .packing import PackedRow
from .rehearsal import rehearse
from .rewards import RewardCaller
from .rolling_out import RollsOut
from .rollout import Engine
from .row_sampler import RowSampler
from .sampling import Sampling
from .saving import SavesCheckpoints
from .scoring import add_scoring_forward
from .selection import rows_right
from .training_rows import TrainingRow
from .views import TokenWeigher
from .weights import copy_weights, use_leaf_modules


class RolloutLoader:
    """The Trainer's train data loader. Not prepared by accelerate: a prepared loader reads one batch ahead,
    and every rollout would come from weights one update old. Starts at global_step, so a resumed run
    redraws nothing."""

    def __init__(self, trainer: "Qwen2VLGRPOTrainer"):
        self.trainer = trainer

    def __iter__(self) -> Iterator[TrainingRow]:
        trainer, args, control = self.trainer, self.trainer.args, self.trainer.run_control
        trainer.state.compute_steps(args, args.max_steps)  # a checkpoint brings those of its own run along
        first = trainer.state.global_step // args.updates_per_rollout
        if args.rehearse:
            rehearse(trainer)
        if trainer.validation_is_due():  # the checkpoint was saved in the middle of it
            trainer.evaluate()
        source = (trainer.train_dataset, trainer.encoder, trainer.train_rows, trainer.row_sampler.rows)
        for number, prompts in enumerate(rollout_prompts(args, *source, first), start=first):
            control.agree(ahead=control.longest_step)
            with control.step_timed():
                rows = trainer.roll_out(number, prompts)
                for _ in range(args.num_iterations):
                    yield from rows


class Qwen2VLGRPOTrainer(RollsOut, SavesCheckpoints, Trainer):
    """GRPO on Qwen2-VL.

    `model` is the policy (float32, or what DeepSpeed makes of it), `engine` owns the rollout copy of its
    weights, `ref_model` is needed with beta > 0 only, and not with LoRA. `rows` of `data` are trained on.
    `validation_sets` maps names to data sets and `eval_encoder` shows them as the grader does; without a
    `keep_best` they are only measured. A `weigher` gives each token its own share of the advantage.
    """

    def __init__(
        self, model, args: GRPOArguments, processor, engine: Engine, data: CountingData, rows: Sequence[int],
        encoder: PromptEncoder, rewards: RewardCaller, validation_sets: dict[str, CountingData],
        eval_encoder: PromptEncoder, keep_best: KeepBest | None = None, ref_model=None,
        callbacks: Sequence = (), run_control: RunControl | None = None,
        weigher: TokenWeigher | None = None,
    ):  # fmt: skip
        self.run_control = run_control or RunControl()
        self.engine, self.train_rows, self.encoder, self.rewards = engine, list(rows), encoder, rewards
        self.row_sampler = RowSampler(args, data, rows)
        self.noisy = NoisyRollout(args, engine, processor.image_processor) if args.noisy_rollout else None
        self.validation_sets, self.eval_encoder = validation_sets, eval_encoder
        self.keep_best, self.weigher, self.vision_is_frozen = keep_best, weigher, vision_is_frozen(model)
        self.validation_rows = {
            name: validation.pick_rows(len(data), args.eval_limit) for name, data in validation_sets.items()
        }
        self.longest: dict[str, int] = {}  # the row with the longest prompt of each set, for a rehearsal
        self.ref_model = add_scoring_forward(ref_model).eval() if ref_model is not None else None
        super().__init__(
            model=add_scoring_forward(model),
            args=args,
            train_dataset=data,
            eval_dataset=validation_sets or None,
            processing_class=processor,
            callbacks=list(callbacks),
        )
        if self.is_deepspeed_enabled and args.hf_deepspeed_config.is_zero3():
            use_leaf_modules(model)
        self.model_accepts_loss_kwargs = False  # the Trainer then divides by the accumulation steps
        high = args.epsilon if args.epsilon_high is None else args.epsilon_high
        self.loss_settings = LossSettings(
            args.epsilon, high, args.beta, args.use_bias_correction_kl, args.importance_sampling_level
        )
        self.sampling = Sampling(
            greedy=False, max_new_tokens=args.max_completion_length, temperature=args.temperature,
            top_p=args.top_p, top_k=args.top_k or 0, min_p=args.min_p or 0.0,
        )  # fmt: skip
        self.finite = FiniteWatch(args, self.run_control)
        self.collapse_watch = CollapseWatch()
        self.refreshed_at = 0  # the update whose weights the rollout copy holds
        self.measured_in: str | None = None  # names the rows of the validations (run_identity.measured_in)
        self.best_score = -1.0  # of the validations, where no submission is kept
        self.validated_at = 0  # the last update that was validated (0: before training)
        self.validate_again = False  # the checkpoint to go on from: the submission made of this run is gone
        self.rollout_logs: list[
            dict[str, float]
        ] = []  # of the rollouts since the last log line, of all ranks
        self.rollout_means: dict[str, float] = {}
        self.loss_sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=args.device))
        self.times: dict[str, float] = {}  # seconds of the newest update, from StepLine
        self.samples: list[dict] = []  # best and worst completion of this rank's groups, for rollouts.jsonl

    # --- data: rollouts -----------------------------------------------------------------------------------

    def get_train_dataloader(self) -> RolloutLoader:
        return RolloutLoader(self)

    @torch.no_grad()
    def score(
        self, model, row: PackedRow, statistic: str | None = None, vocab_limit: int | None = None
    ) -> Tensor:
        """Log-probs (or a statistic) of a row under `model`, [N]. Every rank calls it for as many rows."""
        model.eval()
        inputs = row.to(self.args.device).model_inputs()
        how = {"temperature": self.args.temperature, "statistic": statistic, "vocab_limit": vocab_limit}
        return model(**inputs, **how).float()

    def refresh(self, again: bool = False) -> None:
        """Brings the rollout copy up to date with the policy. `again`: it holds something else."""
        if again or self.refreshed_at != self.state.global_step:
            copy_weights(self.model, self.engine.model)
            self.refreshed_at = self.state.global_step

    # --- the update ---------------------------------------------------------------------------------------

    def training_step(self, model, inputs: TrainingRow, num_items_in_batch=None) -> Tensor:
        if self.at_rollout_boundary():  # a rollout's later updates are finished first
            self.run_control.agree()
        loss = super().training_step(model, inputs, num_items_in_batch)
        return loss.nan_to_num(0.0, 0.0, 0.0)  # of a dropped update: the Trainer's sum would never recover

    def compute_loss(
        self, model, inputs: TrainingRow, return_outputs=False, num_items_in_batch=None
    ) -> Tensor:
        logps = model(**inputs.packed.model_inputs(), temperature=self.args.temperature)  # [N]
        loss, sums = grpo_loss(
            logps, inputs.old_logps, inputs.ref_logps, inputs.advantages, inputs.weights,
            inputs.packed.owners, self.loss_settings,
        )  # fmt: skip
        # From the second update of a rollout on, logps differ by what was learned in between.
        sampled = logps.detach() if inputs.old_logps is None else inputs.old_logps
        sums["gap"] = (sampled - inputs.rollout_logps).abs().sum()
        for name, value in sums.items():
            self.loss_sums[name] += value.to(loss.device)
        self.finite.add(inputs, loss)
        if self.accelerator.sync_gradients and not self.finite.look(self.state.global_step + 1):
            loss = loss * math.nan  # on all ranks: the gradient is not finite then, and the update dropped
        # The row's share of the update's loss: data parallelism averages over ranks, the Trainer over rows.
        return loss * self.args.world_size * self.current_gradient_accumulation_steps

    def _get_grad_norm(self, model, grad_norm=None):
        """Looked at before the optimizer steps. DeepSpeed has stepped by now, or skipped it in silence."""
        norm = super()._get_grad_norm(model, grad_norm)
        fine = math.isfinite(norm) and not self.accelerator.optimizer_step_was_skipped
        if not self.finite.settle(self.state.global_step + 1, fine):
            return norm
        model.zero_grad()  # without gradients the optimizer changes nothing
        return math.nan

    def _prepare_inputs(self, inputs: TrainingRow) -> TrainingRow:
        return inputs.to(self.args.device)

    def _get_num_items_in_batch(self, batch_samples, device) -> None:
        return None

    def floating_point_ops(self, inputs) -> int:
        return 0

    # --- validation, keep-best, checkpoints ---------------------------------------------------------------

    def evaluate(
        self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Greedy accuracy under the grader's protocol, on every rank's share; the best so far becomes the
        submission."""
        self.refresh()
        summaries = self.validate()
        once_more = self.validated_at == self.state.global_step
        self.validated_at, self.validate_again = self.state.global_step, False
        score = validation.score(summaries.values())
        logs = {
            f"eval_{name}_{k}": v
            for name, summary in summaries.items()
            for k, v in numbers_of(summary).items()
        }
        logs["eval_score"] = score
        self.log(dict(logs))
        better = self.offer(score, summaries)
        self.run_control.stale = 0 if better else self.run_control.stale + (not once_more)
        error = difference_error(summary["total"] for summary in summaries.values())
        self.collapse_watch.add_score(self.state.global_step, score, error)
        self.look_for_collapse()
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, logs)
        return logs

    def validate(self) -> dict[str, dict]:
        """Summaries of what the rollout copy holds, by validation set."""
        args, control, summaries = self.args, self.run_control, {}
        stoppable = self.at_rollout_boundary()
        with control.timed("validation"):
            for name, data in self.validation_sets.items():
                examples = validation.evaluate(
                    self.engine, self.eval_encoder, data, rows=self.validation_rows[name],
                    batch_size=args.per_device_eval_batch_size, rank=args.process_index,
                    world_size=args.world_size, num_workers=args.dataloader_num_workers, name=name,
                    interrupted=control.signalled if stoppable else None,
                )  # fmt: skip
                if stoppable:
                    control.agree_on_signal()
                examples = validation.gather_examples(examples)
                summaries[name] = validation.summarize(examples) | {"rows": rows_right(examples)}
        return summaries

    def offer(self, score: float, summaries: dict[str, dict]) -> bool:
        """Whether the policy is this run's best up to here. It becomes the submission when it is better than
        what stands there, which a run that was stopped may have found further on."""
        better = score > self.best_score
        self.best_score = max(score, self.best_score)
        if self.keep_best:
            start = self.run_control.clock()
            if self.keep_best.offer(self.model, score, summaries, self.state.global_step):
                self.run_control.took("submission", self.run_control.clock() - start)
        return better

    def validation_is_due(self, info: dict | None = None) -> bool:
        """Whether the validation of this update, or of a checkpoint's, was interrupted. Planned is what
        transformers' DefaultFlowCallback plans, the last update's in any case."""
        args, step, validated_at = self.args, self.state.global_step, self.validated_at
        if info:
            step, validated_at = info["step"], info["validated_at"]
        planned = step % args.eval_steps == 0 or step == args.max_steps
        planned &= args.eval_strategy != "no" and step > 0 and step >= args.eval_delay
        return self.validate_again or (planned and step != validated_at)

    def at_rollout_boundary(self) -> bool:
        return self.state.global_step % self.args.updates_per_rollout == 0

    # --- stop and go on -----------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | None = None, **kwargs):
        """As the Trainer's. Raises StopRun, on all ranks, once all is saved."""
        control = self.run_control
        if resume_from_checkpoint:
            info = self.marker_of(resume_from_checkpoint)
            control.restore(info)
            self.collapse_watch.restore(info["collapse_watch"])
            self.validated_at, self.best_score = info["validated_at"], info["best_score"]
            self.rewards.restore(info["reward_failures"])
            self.finite.restore(info["not_finite"])
            self.row_sampler.restore(info, info["step"] // self.args.updates_per_rollout)
            if self.keep_best:
                self.keep_best.chosen_score = info["chosen_score"]
        try:
            output = super().train(resume_from_checkpoint, **kwargs)
            if self.validation_is_due():  # it was interrupted after the last update
                self.evaluate()
            return output
        except StopRun as stop:
            raise self.end_early(stop) from None

    def marker_of(self, checkpoint: str | Path) -> dict:
        """What its marker keeps, without scores on other validation rows than this run's."""
        info = complete_marker(checkpoint)
        if info.get("measured_in", self.measured_in) != self.measured_in:
            info |= {"best_score": self.best_score, "chosen_score": -1.0, "stale_validations": 0}
            info["collapse_watch"]["scores"] = self.collapse_watch.scores
        return info

    def end_early(self, stop: StopRun) -> StopRun:
        """Validates where there is time for it, and saves the last finished update."""
        args, step = self.args, self.state.global_step
        if stop.cause == "deadline" and args.eval_strategy != "no" and self.validated_at != step:
            try:
                self.evaluate()
            except StopRun as signal:
                stop = signal
        folder = Path(args.output_dir) / f"checkpoint-{step}"
        if args.save_strategy != "no" and step and self.at_rollout_boundary() and not complete_marker(folder):
            self._save_checkpoint(self.model, None)
        self.callback_handler.on_train_end(args, self.state, self.control)
        return stop

    def _save_checkpoint(self, model, trial) -> None:
        with self.run_control.timed("checkpoint"):
            super()._save_checkpoint(model, trial)

    def checkpoint_info(self) -> dict:
        """What the marker of a checkpoint keeps."""
        next_rollout = self.state.global_step // self.args.updates_per_rollout
        return self.run_control.state() | {
            "measured_in": self.measured_in,
            "validated_at": self.validated_at,
            "best_score": self.best_score,
            "chosen_score": self.keep_best.chosen_score if self.keep_best else -1.0,
            "reward_failures": self.failures_before.get(next_rollout, self.rewards.failures),
            "not_finite": self.finite.state(),
            **self.row_sampler.state(),
            "collapse_watch": self.collapse_watch.state(),
        }

    # --- log ----------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and "train_loss" not in logs:
            if self.rollout_logs:  # a later update of the same rollout shows that rollout's numbers again
                self.rollout_means = means(self.rollout_logs)
            logs |= self.rollout_means | self.times | {"dropped_updates": self.finite.dropped}
            totals = {
                name: self.accelerator.reduce(value.clone()).item() for name, value in self.loss_sums.items()
            }
            tokens = max(1.0, totals.get("tokens", 0.0))
            logs["clip_share"], logs["logps_gap"] = totals["clipped"] / tokens, totals["gap"] / tokens
            if "kl" in totals:
                logs["kl"] = totals["kl"] / tokens
            self.rollout_logs = []
            self.loss_sums.clear()
        failures = {"checkpoint_failures": self.checkpoint_failures}
        failures["submission_failures"] = self.keep_best.failures if self.keep_best else 0
        logs |= {name: count for name, count in failures.items() if count}
        seen = self.state.global_step * self.args.prompts_drawn / self.args.updates_per_rollout
        self.state.epoch = seen / len(self.train_rows)
        super().log(logs, start_time)
