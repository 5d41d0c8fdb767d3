"""Everything that can be known before the first update: one screen, and all faults together.

Each check is a function of the Run. It returns the lines of the screen and the faults, and leaves in the Run
what it opened; what it refuses by raising is a fault too. A check whose needs an earlier one could not meet
is left out, and its line says so.
"""

import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object
from transformers import Qwen2VLConfig

from . import (
    data_survey,
    lora,
    machine_checks,
    machines,
    memory,
    model_checks,
    reward_checks,
    start,
    validation,
)
from .arguments import GRPOArguments, ModelArguments, RecipeArguments
from .check_args import check_args
from .checkpoint import local_model, write_atomically
from .data import CountingData, load_rows
from .data_checks import check_rows, drop_overlap, good_rows, refuse_same_folder
from .machine_checks import number_of
from .processor import load_processor
from .rewards import Reward, RewardError
from .rounds import check_round, validation_rows
from .token_weights import TokenWeights, check_token_weights

WIDTH, LABEL = 100, 13  # columns of the screen, and of the names at its left
# What the user calls a thing that a check needs.
WORDS = dict.fromkeys(("config", "parameters", "weights", "start_from"), "model")
WORDS |= dict.fromkeys(("rows", "facts"), "train")
Found = tuple[list[str], list[str]]  # lines, faults


@dataclass
class Run:
    """What was asked for, and what the checks opened; None where one could not."""

    recipe: RecipeArguments
    args: GRPOArguments
    model_args: ModelArguments
    registry: dict[str, Callable]
    devices: list[machine_checks.Device]  # of all ranks
    flags: bool | None = None
    base: Path | None = None  # the model's folder
    config: Qwen2VLConfig | None = None
    parameters: int | None = None
    trained: int | None = None  # of them, or of the adapters
    weights: bool | None = None  # whether the files hold what the configuration says
    template: bool | None = None
    processor: Any = None
    data: CountingData | None = None
    validation_sets: dict[str, CountingData] = field(default_factory=dict)
    rows: list[int] | None = None  # of data: those to train on
    facts: list[data_survey.RowFacts] | None = None  # about each of them
    eval_facts: list[data_survey.RowFacts] = field(default_factory=list)  # about the validation rows
    longest: dict[str, int] = field(default_factory=dict)  # the row with the longest prompt of each set
    rewards: list[Reward] | None = None
    token_weights: TokenWeights | None = None
    start_from: Path | None = None  # the folder of the first weights: the base's, but for --init_from
    done: tuple[Path, dict] | None = None  # the checkpoint to go on from, and its marker
    identity: dict | None = None  # for OUT/run.json

    @property
    def out(self) -> Path:
        return Path(self.args.output_dir)

    @property
    def saved(self) -> int:
        """Parameters in a checkpoint."""
        return self.trained if self.model_args.use_peft else self.parameters

    @property
    def is_main(self) -> bool:
        return self.args.process_index == 0


class NotReady(ValueError):
    """The numbered list of everything to change."""


def preflight(
    recipe: RecipeArguments, args: GRPOArguments, model_args: ModelArguments, registry: dict[str, Callable]
) -> Run:
    """Makes every check on every rank (rank 0 alone looks at the rows) and shows the screen on rank 0; that
    of a run which starts is kept as OUT/preflight.txt. Raises NotReady on rank 0, and
    SystemExit on the others, when a rank found a fault."""
    if recipe.dry_run:
        machines.plan_dry_run(args)
    run = Run(recipe, args, model_args, registry, machine_checks.devices(args))
    lines, faults = look(run)
    of_ranks = gather_object([faults])
    for rank, others in enumerate(of_ranks[1:], start=1):
        faults += [f"rank {rank}: {fault}" for fault in others if fault not in of_ranks[0]]
    shared = [faults, run.rows, run.longest, args.max_steps, run.done, run.identity]
    broadcast_object_list(shared)
    faults, run.rows, run.longest, args.max_steps, run.done, run.identity = shared
    if not run.is_main:
        if faults:
            raise SystemExit(1)
        return run
    screen = "\n".join(lines)
    print(screen, flush=True)
    if faults:
        raise NotReady(to_change(faults))
    if recipe.dry_run:
        print("ready: nothing was launched (--dry_run)")
    else:
        start.begin(run)
        print("ready", flush=True)
        write_atomically(run.out / "preflight.txt", f"{screen}\nready\n".encode())
    return run


def look(run: Run) -> Found:
    """The lines and the faults of all checks."""
    screen, faults, shown = [], [], ""
    for name, check, needs in CHECKS:
        lacking = {WORDS.get(need, need) for need in needs if getattr(run, need) is None}
        if lacking and name == shown:
            continue  # its own first part has said why
        if lacking:
            lines, found = [f"not looked at: {' and '.join(sorted(lacking))} must be right first"], []
        else:
            try:
                lines, found = check(run)
            except (ValueError, RewardError, OSError) as refusal:
                lines, found = [], [str(refusal)]
        numbers = range(len(faults) + 1, len(faults) + len(found) + 1)
        faults += found
        if found:
            lines = [*lines, f"-> {', '.join(map(str, numbers))} below"]
        screen += entry("" if name == shown else name, lines)
        shown = name if lines else shown
    return screen, faults


def entry(name: str, lines: list[str]) -> list[str]:
    """The lines under one name, wrapped."""
    wrapped = [part for line in lines for part in textwrap.wrap(line, WIDTH - LABEL, break_on_hyphens=False)]
    return [f"{name if i == 0 else '':<{LABEL}}{part}" for i, part in enumerate(wrapped)]


def to_change(faults: list[str]) -> str:
    items = [f"{n:>3}. " + fault.replace("\n", "\n     ") for n, fault in enumerate(faults, start=1)]
    return "\n".join([f"not ready: {len(faults)} thing{'s' * (len(faults) > 1)} to change", *items])


# --- The flags


def check_flags(run: Run) -> Found:
    try:
        check_args(run.recipe, run.args, run.model_args)
    except ValueError as refusals:
        return [], str(refusals).splitlines()  # a sentence each
    run.flags = True
    return [], []


# --- The model


def check_model(run: Run) -> Found:
    if not run.model_args.model_name_or_path:
        raise ValueError("--model_name_or_path is missing: set it to a Qwen2-VL folder or a hub name")
    run.base = local_model(run.model_args.model_name_or_path)
    run.config = model_checks.check_config(run.base)
    shapes = model_checks.parameter_shapes(run.config)
    run.parameters = sum(map(math.prod, shapes.values()))
    run.trained = lora.trained_parameters(shapes, run.model_args)
    run.args.adapters = run.trained if run.model_args.use_peft else 0
    run.args.frozen = run.parameters + run.args.adapters - run.trained
    model = run.model_args
    run.args.vision_learns = model.lora_vision if model.use_peft else not model.freeze_vision_tower
    limit, vocabulary = run.args.vocab_limit or 0, run.config.get_text_config().vocab_size
    too_high = f"--vocab_limit {limit}: the model has {vocabulary} logits; set at most that"
    trained = "" if run.trained == run.parameters else f", {run.trained:,} trained"
    if run.model_args.use_peft:
        trained += " in adapters"
    lines = [f"{run.base} ({run.parameters:,} parameters{trained})"]
    return lines, [too_high] if limit > vocabulary else []


def check_weights(run: Run) -> Found:
    lines, faults = model_checks.check_weights(run.base, run.config) if run.is_main else ([], [])
    run.weights = True if not faults else None
    return lines, faults


def check_processor(run: Run) -> Found:
    processor = load_processor(run.base, run.recipe.min_pixels, run.recipe.max_pixels)
    lines, faults = model_checks.check_processor(run.base, processor, run.config)
    if not faults:
        run.processor = processor
    return lines, faults


def check_generation(run: Run) -> Found:
    return model_checks.check_generation(run.base, run.config, run.args)


def check_template(run: Run) -> Found:
    lines, faults = model_checks.check_template(run.base, run.processor)
    run.template = True if not faults else None
    return lines, faults


# --- The data


def check_data(run: Run) -> Found:
    recipe, sets, faults = run.recipe, {}, []
    named = {"train": recipe.dataset_name, "val": recipe.val_dataset, "ood_val": recipe.ood_val_dataset}
    for name, source in named.items():
        split = recipe.dataset_train_split if name == "train" else recipe.dataset_test_split
        try:
            sets |= {name: load_rows(source, split, recipe.dataset_config)} if source else {}
        except ValueError as error:
            faults.append(f"{name}: {error}")
    run.data = sets.pop("train", None)
    run.validation_sets = sets
    return [], faults


def check_training_rows(run: Run) -> Found:
    """The training rows without bad ones and without images that validation has too."""
    if not run.is_main:
        return [], []
    data, sets, skip = run.data, run.validation_sets, run.recipe.skip_bad_rows
    refuse_same_folder(data, list(sets.values()))
    try:
        run.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"OUT {run.out} cannot be made ({error.strerror}): set OUT to a folder") from error
    # Only decoding finds a file cut short, and dropping it must come before the order of rows is drawn.
    bad = check_rows(data, run.processor, full=run.recipe.check_data or skip)
    kept = good_rows(data, bad, skip_bad_rows=skip, out=run.out)
    run.rows, shared = drop_overlap(data, list(sets.values()), rows=kept)
    return [
        f"{data.source}: question in {data.question_column}, true count in {data.solution_column}",
        f"{len(run.rows):,} of {len(data):,} rows used: {len(bad)} bad, {shared} share an "
        "image with validation",
    ], []


def check_answers(run: Run) -> Found:
    run.facts = data_survey.row_facts(run.data, run.processor, run.rows)
    run.longest["train"] = data_survey.longest_row(run.rows, run.facts)
    return data_survey.check_answers(run.facts)


def check_images(run: Run) -> Found:
    return data_survey.check_images(run.data, run.processor, run.facts)


def check_prompts(run: Run) -> Found:
    limit = run.config.get_text_config().max_position_embeddings
    room = run.args.max_completion_length
    return data_survey.check_prompts(run.data, run.rows, run.facts, limit, room)


def check_validation_rows(run: Run) -> Found:
    if not run.is_main:
        return [], []
    faults = []
    for name, data in run.validation_sets.items():
        if bad := check_rows(data, run.processor):
            first = "; ".join(f"row {one.index}: {one.reason}" for one in bad[:10])
            faults.append(f"{len(bad)} rows of {name} cannot be used: repair them ({first})")
        else:
            looked_at = validation.pick_rows(len(data), run.args.eval_limit)
            facts = data_survey.row_facts(data, run.processor, looked_at)
            run.eval_facts += facts
            run.longest[name] = data_survey.longest_row(looked_at, facts)
    sets = run.validation_sets.items()
    return [f"{name}: {len(data):,} rows of {data.source}" for name, data in sets], faults


# --- The machine


def check_devices(run: Run) -> Found:
    return machine_checks.check_devices(run.devices, run.args)


def check_memory(run: Run) -> Found:
    if not run.is_main:
        return [], []
    train = memory.longest_of(run.facts, run.processor)
    evals = memory.longest_of(run.eval_facts, run.processor) if run.eval_facts else None
    return memory.check_memory(run.devices, run.config, run.parameters, run.args, train, evals)


# --- What the run will do


def check_updates(run: Run) -> Found:
    args = run.args
    if not run.is_main:
        return [], []
    if args.max_steps <= 0:
        prompts = max(1, int(len(run.rows) * args.num_train_epochs))
        rollouts = -(-prompts // args.prompts_drawn)
        args.max_steps = rollouts * args.updates_per_rollout
    epochs = args.max_steps / args.updates_per_rollout * args.prompts_drawn / len(run.rows)
    processes = number_of(args.processes, "process")
    rows = number_of(args.gradient_accumulation_steps, "row")
    votes = args.completions_drawn
    voting = f", the first of {votes} that vote" if votes > args.num_generations else ""
    drawn = f", of {args.oversample:g} times as many" if args.oversample > 1 else ""
    lines = [
        f"{number_of(args.prompts_per_update, 'prompt')} ({processes} x {rows} x {args.prompts_per_row}) x "
        f"{args.num_generations} completions of up to {args.max_completion_length} tokens"
        f"{voting}{drawn}",
        f"{number_of(args.max_steps, 'update')}, {args.updates_per_rollout} a rollout: {epochs:.2f} epochs, "
        f"in {'bf16' if args.bf16 else 'float32'} over float32 master weights",
    ]
    if run.validation_sets and args.eval_strategy != "no":
        used = validation_rows(run.recipe, args, run.validation_sets)
        sets = " + ".join(f"{name} {len(rows):,}" for name, rows in used.items())
        lines.append(f"every {args.eval_steps:g} updates a validation on {sets} rows")
    return lines, []


def check_hours(run: Run) -> Found:
    limit = run.args.max_hours
    if not limit:
        return ["no limit (--max_hours); the line of each update says when the last one is expected"], []
    return [f"at most {limit:g} (--max_hours); how they are spent is printed after the third update"], []


CHECKS = [  # name, function, what an earlier check must have left in the Run
    ("packages", lambda _: machine_checks.check_packages(), ()),
    ("flags", check_flags, ()),
    ("model", check_model, ()),
    ("model", check_weights, ("config",)),
    ("processor", check_processor, ("config",)),
    ("sampling", check_generation, ("config",)),
    ("template", check_template, ("processor",)),
    ("data", check_data, ()),
    ("machines", machines.check_machines, ()),
    ("train", check_training_rows, ("data", "processor", "template")),
    ("answers", check_answers, ("rows",)),
    ("images", check_images, ("facts",)),
    ("prompts", check_prompts, ("facts",)),
    ("validation", check_validation_rows, ("data", "processor", "template")),
    ("rewards", reward_checks.check_rewards, ()),
    ("rewards", reward_checks.check_gold, ("rewards", "data", "processor")),
    ("advantages", check_token_weights, ()),
    ("GPUs", check_devices, ()),
    ("memory", check_memory, ("flags", "parameters", "facts")),
    ("update", check_updates, ("flags", "rows")),
    ("round", check_round, ("flags", "weights")),
    ("start", start.check_start, ("weights", "rows", "rewards", "start_from")),
    ("submission", start.check_submission, ("weights",)),
    ("disk", start.check_disk, ("flags", "identity")),
    ("hours", check_hours, ()),
]
