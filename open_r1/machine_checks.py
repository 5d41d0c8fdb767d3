"""Whether this machine can carry the run: packages and GPUs; memory.py says what memory is needed.

Each check returns (lines to show, faults to change).
"""

import platform
from dataclasses import dataclass

import psutil
import torch
from accelerate.utils import gather_object

from . import versions
from .arguments import GRPOArguments

Found = tuple[list[str], list[str]]  # lines, faults
SHOWN = ("torch", "transformers", "trl", "deepspeed", "accelerate")


def number_of(count: int, what: str) -> str:
    """1 prompt, 2 prompts; 1 process, 2 processes."""
    plural = "" if count == 1 else "es" if what.endswith("s") else "s"
    return f"{count:,} {what}{plural}"


def check_packages() -> Found:
    missing, outside = versions.find_faults()
    shown = [f"{name} {version}" for name in SHOWN if (version := versions.installed(name))]
    shown += [f"CUDA {torch.version.cuda or 'none'}", f"Python {platform.python_version()}"]
    faults = [f"{fault} was never tested" for fault in outside] + [f"{fault} is needed" for fault in missing]
    verdict = "" if faults else ": all in the tested ranges"
    return [", ".join(shown) + verdict], [f"{fault}; install from requirements.txt" for fault in faults]


# --- GPUs


@dataclass(frozen=True)
class Device:
    name: str
    free: int  # bytes, before this run allocates any
    total: int


def devices(args: GRPOArguments) -> list[Device]:
    """The device of each process of the run, in the order of their ranks; the memory of the host for the CPU.

    A collective. A dry run is one process, and looks at all GPUs that it sees.
    """
    if args.device.type != "cuda":
        memory = psutil.virtual_memory()
        own = [Device("CPU", memory.available, memory.total)]
    else:
        planned = args.processes > args.world_size
        own = [_gpu(i) for i in (range(torch.cuda.device_count()) if planned else [args.device.index or 0])]
    return gather_object(own)


def _gpu(index: int) -> Device:
    return Device(torch.cuda.get_device_name(index), *torch.cuda.mem_get_info(index))


def check_devices(found: list[Device], args: GRPOArguments) -> Found:
    if args.device.type != "cuda":
        if args.use_cpu:
            free = f"{gib(found[0].free)} of {gib(found[0].total)} GiB of memory free"
            return [f"none (--use_cpu): {number_of(args.world_size, 'process')} on the CPU, {free}"], []
        fault = "no GPU is visible to PyTorch: see nvidia-smi and CUDA_VISIBLE_DEVICES, or set --use_cpu true"
        return [], [fault]
    faults = []
    if args.n_gpu > 1 and args.processes == 1:
        faults.append(
            f"{args.n_gpu} GPUs are visible to a single process: start one for each, as train.sh does, or "
            "set CUDA_VISIBLE_DEVICES to one"
        )
    names = sorted({device.name for device in found})
    free = ", ".join(gib(device.free) for device in found)
    return [f"{len(found)} x {' and '.join(names)}: {free} of {gib(found[0].total)} GiB free"], faults


def gib(size: int) -> str:
    return f"{size / 2**30:.1f}" if size >= 2**30 else f"{size / 2**30:.3f}"
