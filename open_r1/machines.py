"""Several machines, started by the same command on each: whether they agree, before the first update.

Rank 0 writes logs, submission and markers; every rank writes its share of a checkpoint, and all go on from
it: OUT is one folder that all machines see. Model and data may be copies.
"""

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object

from . import run_identity
from .arguments import GRPOArguments
from .validation import pick_rows

Found = tuple[list[str], list[str]]  # lines, faults
ZERO3 = Path(__file__).resolve().parent.parent / "zero3.json"
SAMPLED_ROWS = 64  # of each data set
SHARED_S = 10  # a network file system may take so long to show a new file elsewhere


def plan_dry_run(args: GRPOArguments) -> None:
    """It is one process, and counts on what train.sh would launch: one for each GPU that it sees, on as many
    machines as NUM_MACHINES says, with the DeepSpeed configuration in ZERO."""
    machines, on_gpus = int(os.environ.get("NUM_MACHINES", 1)), args.device.type == "cuda"
    if args.world_size == 1:
        args.planned_processes = machines * (torch.cuda.device_count() if on_gpus else 1)
        if on_gpus:
            args.deepspeed = args.deepspeed or os.environ.get("ZERO", str(ZERO3))


def check_machines(run) -> Found:
    """Compares what each rank was given. All ranks call it; on one machine there is nothing to compare."""
    if run.args.world_size == 1:
        return [], []
    machines = gather_object([int(os.environ.get("GROUP_RANK", 0))])
    counts = [machines.count(machine) for machine in sorted(set(machines))]
    if len(counts) == 1:
        return [], []
    facts = gather_object([_facts(run)])
    faults = [] if _sees_out(run) else [
        f"OUT {run.out} is not one folder on all machines: set it to a disk that they share, since each rank "
        "writes its share of a checkpoint there"
    ]  # fmt: skip
    if len(set(counts)) > 1:
        faults.append(f"the machines run {counts} processes: set the same NUM_GPUS on each")
    for machine, there in zip(machines, facts, strict=True):
        faults += [fault for fault in _differences(facts[0], there, machine) if fault not in faults]
    return [f"{len(counts)} with {counts[0]} processes each"], faults


def _facts(run) -> dict[str, Any]:
    """What must be the same everywhere. It never raises: the other ranks would wait."""
    flags = run_identity.defining_flags(run.recipe, run.args, run.model_args)
    facts = {f"--{name}": value for name, value in flags.items()}
    facts["the model"] = None
    with suppress(Exception):  # there is none, or its files are broken in one of many ways
        facts["the model"] = run_identity.model_content(run.base)
    sets = {"train": run.data, **run.validation_sets}
    for name, data in sets.items():
        if data is not None:
            facts[f"{name} rows"] = [len(data), *(_row(data, i) for i in pick_rows(len(data), SAMPLED_ROWS))]
    return facts


def _row(data, row: int) -> str | None:
    with suppress(Exception):  # a bad row is told by its own check
        return run_identity.data_content(data, [row])
    return None


def _differences(here: dict, there: dict, machine: int) -> list[str]:
    lines = []
    for name in here.keys() & there.keys():
        if here[name] != there[name]:
            flag = name.startswith("--")
            values = f" ({here[name]} and {there[name]})" if flag else ""
            way = "start the same command on each" if flag else "copy the first machine's"
            lines.append(f"{name} of machine {machine} and of machine 0 differ{values}: {way}")
    return sorted(lines)


def _sees_out(run) -> bool:
    """Whether every rank finds in OUT what rank 0 writes there. A collective."""
    token = [f".shared-{secrets.token_hex(6)}"]
    broadcast_object_list(token)
    file = run.out / token[0]
    if run.is_main:
        with suppress(OSError):  # check_disk says so
            run.out.mkdir(parents=True, exist_ok=True)
            file.touch()
    gather_object([None])  # it is written
    end = time.monotonic() + SHARED_S
    while not (found := file.exists()) and time.monotonic() < end:
        time.sleep(0.2)
    seen = all(gather_object([found]))
    if run.is_main:
        file.unlink(missing_ok=True)
    return seen
