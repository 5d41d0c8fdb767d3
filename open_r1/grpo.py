"""Trains Qwen2-VL with GRPO: the reward functions and their registry first, then main().

    bash train.sh                                        the tuned recipe on all GPUs
    accelerate launch open_r1/grpo.py --model_name_or_path … --dataset_name … --output_dir …

To change what is rewarded, edit a function below, or add one to the registry and name it in --reward_funcs.
"""

import atexit
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if __package__ in (None, ""):  # run as a file, as accelerate launch does
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while the packages are imported: no traceback
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.path.append("")  # dotted --reward_funcs are looked up in the current folder too

from open_r1.versions import check_versions

check_versions()

import torch
from accelerate import PartialState
from transformers import PrinterCallback, ProgressCallback, set_seed
from transformers.integrations import TensorBoardCallback

from open_r1.arguments import GRPOArguments, ModelArguments, RecipeArguments
from open_r1.callbacks import BadRowWatch, HoursPlan, JsonLog, StepLine, TensorBoard
from open_r1.checkpoint import load_policy
from open_r1.complete import own_checkpoints
from open_r1.control import RunControl, StopRun, wants_memory
from open_r1.data import PromptEncoder
from open_r1.data_checks import BackgroundDecode
from open_r1.disk import checkpoint_bytes
from open_r1.flag_parser import FlagParser
from open_r1.frozen_vision import freeze_vision_tower
from open_r1.install import read_record
from open_r1.label_free import majority_vote_reward, negative_entropy_reward, self_certainty_reward
from open_r1.lora import add_adapters
from open_r1.preflight import preflight
from open_r1.processor import load_processor
from open_r1.protocol import ANSWER, extract_answer
from open_r1.rewards import RewardCaller, RewardError
from open_r1.rollout import FastEngine, TransformersEngine
from open_r1.rounds import first_weights, keeper, validation_rows
from open_r1.run_identity import measured_in
from open_r1.status import FAILED, NO_MEMORY, REWARD
from open_r1.trainer import Qwen2VLGRPOTrainer
from open_r1.views import TokenWeigher

# --- rewards ----------------------------------------------------------------------------------------------
#
# fn(completions, **columns) -> list[float | None]. completions are [[{"role": "assistant", "content":
# str}], …]; every column of the data set comes as a list, one value per completion, "answer" (the true
# count, int) among them. A function may also name what open_r1/rewards.py lists as EXTRAS. None means
# "cannot judge" and is left out.


def accuracy_reward(completions: list[list[dict]], answer: list[int], **kwargs) -> list[float]:
    """1.0 where the grader's own rule reads the true count, else 0.0."""
    return [float(extract_answer(c[0]["content"]) == a) for c, a in zip(completions, answer, strict=True)]


def format_reward(completions: list[list[dict]], truncated: list[bool], **kwargs) -> list[float]:
    """1.0 for a completion that ends by itself, right behind its one answer block.

    Whatever comes before the block is free: a think block is not rewarded. A policy that repeats
    `</answer>` up to the length cap earns nothing.
    """

    def well_formed(text: str) -> bool:
        blocks = list(ANSWER.finditer(text))
        one = len(blocks) == 1 and text.count("<answer>") == 1 and text.count("</answer>") == 1
        return one and not text[blocks[0].end() :].strip()

    return [
        float(well_formed(c[0]["content"]) and not t) for c, t in zip(completions, truncated, strict=True)
    ]


def close_reward(completions: list[list[dict]], answer: list[int], **kwargs) -> list[float]:
    """1.0 for a count that is off by one, else 0.0: partial credit, in addition to the accuracy.

    It orders the wrong answers of a group that has no right one. What is graded is exact: a weight near the
    accuracy's would teach to be content with one too few.
    """
    counts = [extract_answer(c[0]["content"]) for c in completions]
    return [float(count is not None and abs(count - a) == 1) for count, a in zip(counts, answer, strict=True)]


def soft_overlong_reward(
    completions: list[list[dict]], completion_ids: list[list[int]], max_completion_length: list[int],
    cache: int | None = None, **kwargs,
) -> list[float]:  # fmt: skip
    """0.0, and over the last `cache` tokens before the length cap down to -1.0 at it (DAPO, arXiv 2503.14476,
    eq. 13). The cache is a fifth of the cap, as in the paper, unless it is given."""
    cap = max_completion_length[0]
    cache = max(1, cap // 5) if cache is None else cache
    if not 1 <= cache <= cap:
        raise ValueError(f"cache={cache}: set 1 up to --max_completion_length, {cap}")
    return [max(-1.0, min(0.0, (cap - cache - len(ids)) / cache)) for ids in completion_ids]


reward_funcs_registry = {
    "accuracy": accuracy_reward,
    "format": format_reward,
    "close": close_reward,
    "soft_overlong": soft_overlong_reward,
    "majority_vote": majority_vote_reward,
    "self_certainty": self_certainty_reward,
    "negative_entropy": negative_entropy_reward,
}


# --- the script -------------------------------------------------------------------------------------------

HELP = (
    "Trains Qwen2-VL with GRPO. The flags of TRL and transformers are listed too; those of TRL's that this "
    "trainer does not honour are refused."
)


def main() -> None:
    control = RunControl()
    control.handle_signals()
    try:
        types = RecipeArguments, GRPOArguments, ModelArguments
        recipe, args, model_args = FlagParser(types, HELP).parse()
        run(recipe, args, model_args, control)
    except StopRun as stop:
        if stop.code:
            leave_together(stop.code)
            sys.exit(stop.code)
    except (ValueError, RewardError) as refusal:  # sentences for the user, not faults of the code
        control.report_failure(refusal, REWARD if isinstance(refusal, RewardError) else FAILED)
        sys.exit(f"grpo.py: {refusal}")
    except Exception as error:
        if not wants_memory(error):
            control.report_failure(error, FAILED)
            raise
        # Other ranks may wait in a collective for this one: nothing can be done together any more.
        print(f"grpo.py: {control.report_no_memory(error, args)}", file=sys.stderr, flush=True)
        sys.exit(NO_MEMORY)


def run(
    recipe: RecipeArguments, args: GRPOArguments, model_args: ModelArguments,
    control: RunControl | None = None,
):  # fmt: skip
    """Checks, loads, trains, validates; returns the trainer (None after a dry run). Raises StopRun, with all
    saved, where the run ends before its last update."""
    control = control or RunControl()
    set_seed(args.seed)
    ready = preflight(recipe, args, model_args, reward_funcs_registry)
    if recipe.dry_run:
        return None
    say = print if args.process_index == 0 else lambda *_: None
    out, base, done = Path(args.output_dir), ready.base, ready.done
    processor, data, rows, rewards = ready.processor, ready.data, ready.rows, ready.rewards

    step_line, json_log, hours = StepLine(), JsonLog(out), HoursPlan()
    callbacks = [step_line, json_log, hours]
    if args.process_index == 0 and not (recipe.check_data or recipe.skip_bad_rows):
        # Before the models: its processes are forked, which CUDA does not survive.
        callbacks.append(BadRowWatch(data, BackgroundDecode(data, processor, rows=rows), out))

    # Models: the policy, the rollout copy of it, and a reference only for a KL term.
    low = torch.bfloat16 if args.bf16 else torch.float32
    start = first_weights(recipe, out, base)
    # DeepSpeed makes the float32 masters itself, and with LoRA the base needs none.
    policy = load_policy(start, low if args.deepspeed or model_args.use_peft else torch.float32)
    if model_args.use_peft:
        add_adapters(policy, model_args, args.seed)
    if model_args.freeze_vision_tower:
        freeze_vision_tower(policy, low)
    rollout_copy = load_policy(start, low, args.device).requires_grad_(False)
    engine = {"fast": FastEngine, "transformers": TransformersEngine}[args.rollout_engine](
        rollout_copy, processor
    )
    reference = None  # with LoRA it is the policy without its adapters
    if args.beta and not model_args.use_peft:
        reference = load_policy(start, low, args.device).requires_grad_(False)

    keep_images = any(reward.wants("images") for reward in rewards)
    encoder = PromptEncoder(
        processor, policy.config, prompt_mix=recipe.prompt_mix, keep_images=keep_images, seed=args.seed,
        augment=recipe.augment,
    )  # fmt: skip
    grader = PromptEncoder(
        load_processor(base), policy.config, prompt_mix=0.0, keep_images=False, seed=args.seed
    )
    trainer = Qwen2VLGRPOTrainer(
        policy,
        args,
        processor,
        engine,
        data,
        rows,
        encoder,
        rewards=RewardCaller(rewards, recipe.max_reward_failures),
        validation_sets=ready.validation_sets,
        eval_encoder=grader,
        keep_best=keeper(recipe, args, ready, start) if recipe.submission_dir else None,
        ref_model=reference,
        callbacks=callbacks,
        run_control=control,
        weigher=TokenWeigher(ready.token_weights, rollout_copy, processor, args)
        if ready.token_weights
        else None,
    )
    json_log.trainer = step_line.trainer = hours.trainer = trainer
    trainer.validation_rows = validation_rows(recipe, args, ready.validation_sets)
    trainer.measured_in = measured_in(ready.identity, trainer.validation_rows)
    trainer.run, trainer.base, trainer.longest = ready.identity["run"], base, ready.longest
    trainer.checkpoint_size = checkpoint_bytes(ready.saved, ready.trained, bool(args.deepspeed))
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    if trainer.pop_callback(TensorBoardCallback):
        trainer.add_callback(TensorBoard())

    control.begin(args, policy.num_parameters())
    try:
        train(trainer, done)
    except StopRun as stop:
        say(control.end(stop.cause, f"{stop} {what_stands(trainer, done)}", stop.code))
        raise
    say(control.end("finished", f"Finished. {what_stands(trainer, done)}", 0))
    return trainer


def train(trainer: Qwen2VLGRPOTrainer, done: tuple[Path, dict] | None) -> None:
    """Measures what is to be beaten, then makes the updates that `done`, a checkpoint, lacks."""
    if trainer.keep_best:
        trainer.keep_best.start(trainer.engine.model, trainer.validate, done[1]["step"] if done else 0)
        trainer.best_score = trainer.keep_best.baseline
        if trainer.keep_best.start_from == trainer.base:
            trainer.collapse_watch.add_score(0, trainer.keep_best.base_outcome.score, 0.0)
        chosen_score = trainer.marker_of(done[0])["chosen_score"] if done else -1.0
        if trainer.keep_best.best_score < chosen_score:  # it was deleted, or never written
            trainer.validate_again = True
            if trainer.args.process_index == 0:
                print(
                    f"{trainer.keep_best.submission} holds less than this run has found (score "
                    f"{chosen_score:.2f}): {done[0].name} is validated once more"
                )
    if done and done[1]["step"] >= trainer.args.max_steps and not trainer.validation_is_due(done[1]):
        if trainer.args.process_index == 0:
            print(
                f"{done[0]} has all {trainer.args.max_steps} updates: nothing is left to train. Another "
                "round (--init_from submission) has another OUT."
            )
        return
    trainer.train(resume_from_checkpoint=str(done[0]) if done else None)


def what_stands(trainer: Qwen2VLGRPOTrainer, done: tuple[Path, dict] | None) -> str:
    """What is on disk at the end of a run that began from `done`, and how it goes on."""
    step = max(trainer.state.global_step, done[1]["step"] if done else 0)
    sentences = [f"{step:,} of {trainer.args.max_steps:,} updates are done."]
    if step < trainer.args.max_steps:
        own = own_checkpoints(trainer.args.output_dir, trainer.run)
        sentences.append(f"The same command {f'goes on from {own[-1].name}' if own else 'begins anew'}.")
    if best := trainer.keep_best:
        score = f": score {best.best_score:.2f}" if best.best_score >= 0 else ""
        base = (read_record(best.submission) or {}).get("recipe") == "base"
        what = "the base, as no model was surely better" if base else "the best validated model"
        sentences.append(f"{best.submission} holds {what}{score}.")
    return " ".join(sentences)


def leave_together(code: int = 0) -> None:
    """Ranks end at the same time: one that leaves earlier tears down connections that others still use. And
    they end here, with `code`: a thread of gloo that wants Python while it ends aborts the process, now and
    then. A run of one process goes on."""
    state = PartialState()
    if state.num_processes == 1:
        return
    state.wait_for_everyone()
    state.destroy_process_group()
    atexit._run_exitfuncs()  # of loggers
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def threads_left_behind() -> Iterator[None]:
    """The process ends after it, whatever threads a reward function has started: Python waits for them."""
    code = 0
    try:
        yield
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if any(not (one.daemon or one is threading.main_thread()) for one in threading.enumerate()):
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    sys.exit(code)


if __name__ == "__main__":
    with threads_left_behind():
        main()
        leave_together()
