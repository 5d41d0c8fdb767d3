"""Resuming unpickles files, and a pickle can run code: these hold nothing but what this trainer saves."""

from pathlib import Path

from torch.serialization import get_unsafe_globals_in_checkpoint

# The Trainer loads its files weights_only; DeepSpeed does not, and neither reads training_args.bin.
LOADED = ("*.pt", "*.pth")
OWN = {
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "numpy._core.multiarray._reconstruct",
    "numpy.core.multiarray._reconstruct",
    "numpy.dtype",
    "numpy.dtypes.UInt32DType",
    "numpy.ndarray",
}


def pickle_stages_by_value() -> None:
    """DeepSpeed's files hold a member of ZeroStageEnum. Python 3.11.2 (3.11.7 no more) would pickle it as a
    call of getattr, which can reach anything and is refused below. By its value it is the same member."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    ZeroStageEnum.__reduce_ex__ = lambda member, protocol: (type(member), (member.value,))


def refuse_code(checkpoint: Path) -> None:
    """Raise ValueError for a checkpoint that would call anything else when loaded. Nothing is loaded."""
    for file in sorted(path for pattern in LOADED for path in checkpoint.rglob(pattern)):
        try:
            strangers = set(get_unsafe_globals_in_checkpoint(file)) - OWN
        except Exception as error:  # cut short, or of a form that torch.save has not written for years
            kind = type(error).__name__
            raise ValueError(f"{file} cannot be looked into ({kind}); name another checkpoint") from error
        if strangers:
            raise ValueError(
                f"{file} would call {min(strangers)} when it is loaded, as no checkpoint of this trainer "
                "does; name another checkpoint"
            )
