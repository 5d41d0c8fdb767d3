"""How a run starts: from which checkpoint, in whose folder, and whether its disks have room.

The checks take a preflight.Run, and return (lines to show, faults to change).
"""

import os
from pathlib import Path

from . import disk, run_identity
from .arguments import GRPOArguments
from .complete import checkpoint_fault, complete_marker, move_aside, newest_complete, own_checkpoints
from .install import holds_something
from .lock import lock_submission
from .machine_checks import number_of
from .pickles import refuse_code
from .rounds import files_that_define
from .submission import refuse_place

Found = tuple[list[str], list[str]]  # lines, faults


def find_checkpoint(args: GRPOArguments) -> tuple[Path, dict] | None:
    """The checkpoint to go on from, and what its marker holds: --resume_from_checkpoint, else the newest
    complete one, since the same command continues its run. ValueError when it cannot be gone on from."""
    asked = args.resume_from_checkpoint
    if asked and str(asked).lower() != "true":
        if fault := checkpoint_fault(asked):
            raise ValueError(f"--resume_from_checkpoint {asked} is no complete checkpoint: {fault}")
        found = Path(asked), complete_marker(asked)
    else:
        found = newest_complete(args.output_dir)
    if found and found[1]["world_size"] != args.processes:
        raise ValueError(
            f"{found[0]} was written by {found[1]['world_size']} processes and this run has "
            f"{args.processes}: run with as many, or start a new run from the best weights: "
            "MODEL=(the submission) SUBMISSION=(another folder) OUT=(another folder)"
        )
    return found


def check_start(run) -> Found:
    """What OUT is, compared with what is asked for; rank 0 alone looks."""
    if not run.is_main:
        return [], []
    run.done = find_checkpoint(run.args)
    if run.done:
        refuse_code(run.done[0])
    functions = [*run.rewards, run.token_weights] if run.token_weights else run.rewards
    now = run_identity.describe(
        run.recipe, run.args, run.model_args, run.base, functions, run.data, run.rows, run.validation_sets
    )
    now["flags"] |= files_that_define(run)
    run.identity, lines = run_identity.judge(run.out, now, run.done, run.recipe.accept_changes)
    return lines, []


def begin(run) -> None:
    """Makes OUT and SUBMISSION this process's. Checkpoints behind the one that --resume_from_checkpoint names
    are renamed: left there, they would be taken for newer ones than those to come. ValueError while another
    process writes there."""
    run_identity.claim(run.out, run.identity)
    if run.recipe.submission_dir:
        lock_submission(Path(run.recipe.submission_dir))
    for folder in own_checkpoints(run.out, run.identity["run"]):
        if run.done and complete_marker(folder)["step"] > run.done[1]["step"]:
            aside = move_aside(folder)
            print(f"{folder} is behind {run.done[0].name}, which was asked for: renamed to {aside.name}")


def check_disk(run) -> Found:
    """Room for what the run will write: two checkpoints (the older one stays until the newer is whole), and a
    new submission beside the old one."""
    if not run.is_main:
        return [], []
    args, needs = run.args, []
    if args.save_strategy != "no":
        size = disk.checkpoint_bytes(run.saved, run.trained, bool(args.deepspeed))
        own = own_checkpoints(run.out, run.identity["run"])
        left = args.max_steps - (run.done[1]["step"] if run.done else 0)
        copies = max(0, min(2 - len(own), -(-left // int(args.save_steps))))
        needs.append((run.out, copies * size, number_of(copies, "checkpoint")))
    if run.recipe.submission_dir:
        submission, size = Path(run.recipe.submission_dir).resolve(), disk.model_bytes(run.base)
        copies = 1 if holds_something(submission) else 2
        needs.append((submission.parent, copies * size, number_of(copies, "submission")))
    faults = [
        f"{place} cannot be written: set OUT and SUBMISSION to folders elsewhere"
        for place in dict.fromkeys(disk.existing(folder) for folder, _, _ in needs)
        if not (place.is_dir() and os.access(place, os.W_OK))
    ]
    if fault := disk.shortage(needs):
        faults.append(f"{fault}; make room, or set OUT or SUBMISSION to a folder on a larger disk")
    return [
        f"{folder}: {disk.free_bytes(folder) / 1e9:,.2f} GB free, {size / 1e9:,.2f} needed for {what}"
        for folder, size, what in needs
    ] or ["nothing but logs is written"], faults


def check_submission(run) -> Found:
    """What stands in the submission's place, by its headers."""
    if not (run.is_main and run.recipe.submission_dir):
        return [], []
    submission = Path(run.recipe.submission_dir)
    refuse_place(run.base, submission)
    if holds_something(submission):
        return [f"{submission} holds a model, which is measured first and is the one to beat"], []
    return [f"{submission} is empty: the base stands there from the first minute"], []
