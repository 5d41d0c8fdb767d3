"""How a run starts: from which checkpoint, in whose folder, and whether its disks have room.

The checks take a preflight.Run, and return (lines to show, faults to change).
"""

from pathlib import Path

from . import disk, run_identity
from .arguments import GRPOArguments
from .complete import checkpoint_fault, complete_marker, newest_complete, own_checkpoints
from .install import holds_something
from .pickles import refuse_code

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
    if found and found[1]["world_size"] != args.world_size:
        raise ValueError(
            f"{found[0]} was written by {found[1]['world_size']} processes and this run has "
            f"{args.world_size}: run with as many, or start a new run from the best weights: "
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
    now = run_identity.describe(
        run.recipe, run.args, run.base, run.rewards, run.data, run.rows, run.validation_sets
    )
    run.identity, lines = run_identity.judge(run.out, now, run.done, run.recipe.accept_changes)
    return lines, []


def check_disk(run) -> Found:
    """Room for what the run will write: two checkpoints (the older one stays until the newer is whole), and a
    new submission beside the old one."""
    if not run.is_main:
        return [], []
    args, needs, lines = run.args, [], []
    if args.save_strategy != "no":
        size = disk.checkpoint_bytes(run.base, bool(args.deepspeed))
        own = own_checkpoints(run.out, run.identity["run"])
        left = args.max_steps - (run.done[1]["step"] if run.done else 0)
        copies = max(0, min(2 - len(own), -(-left // int(args.save_steps))))
        needs.append((run.out, copies * size, number(copies, "checkpoint")))
        lines.append(f"a checkpoint of {size / 1e9:.2f} GB every {args.save_steps:g} updates")
    if run.recipe.submission_dir:
        submission, size = Path(run.recipe.submission_dir).resolve(), disk.model_bytes(run.base)
        copies = 1 if holds_something(submission) else 2
        needs.append((submission.parent, copies * size, number(copies, "submission")))
        lines.append(f"a submission of {size / 1e9:.2f} GB")
    fault = disk.shortage(needs)
    advice = "make room, or set OUT or SUBMISSION to a folder on a larger disk"
    return [" and ".join(lines) or "nothing but logs"], [f"{fault}; {advice}"] if fault else []


def number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
