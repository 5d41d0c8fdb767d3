"""Models on disk: load a policy exactly, judge a folder, write files that survive a power cut."""

import contextlib
import json
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.integrations import deepspeed as deepspeed_integration
from transformers.utils import logging as transformers_logging

from open_r1.network import hub_lookup
from open_r1.processor import load_processor, refuse_misfit

MODEL_TYPE = "qwen2_vl"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.language_model.embed_tokens.weight"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # as safetensors names them
MAX_HEADER = 100_000_000  # bytes, as in safetensors: what is no such file has any number there


# Models


def local_model(name: str | Path) -> Path:
    """The folder of a model given by folder or by hub name (found in the cache, or downloaded)."""
    if os.path.isdir(name):  # Path.is_dir raises for a name that is too long
        return Path(name)
    if Path(name).is_absolute() or str(name).startswith("."):
        raise ValueError(f"The model folder {name} does not exist; set MODEL to a folder or a hub name.")
    from huggingface_hub import snapshot_download

    try:
        with hub_lookup():
            return Path(snapshot_download(str(name)))
    except Exception as error:  # no such model, no network, no valid name
        reason = _first_line(error)
        raise ValueError(f"{name} is no folder, and the hub does not give it ({reason}).") from error


def load_policy(
    path: str | Path, dtype: torch.dtype | str, device: torch.device | str | None = None
) -> Qwen2VLForConditionalGeneration:
    """Load a whole, unpartitioned Qwen2-VL; `dtype` "auto" is the file's own.

    Raises ValueError, in one sentence, for another kind of model, for a tensor that is missing, left over or
    of another shape (transformers makes up what is missing, and only warns), for values that are not finite,
    and for unreadable files. Only safetensors are read, and no code of the folder is run.
    """
    path = local_model(path)
    refuse_other_kinds(path)
    for file in weight_files(path):
        if fault := file_fault(path / file):
            raise ValueError(fault)
    with outside_zero_init(), _no_progress_bars():
        try:
            # The class itself: transformers does not rename a subclass's tensors, and then makes them up.
            model, loading = Qwen2VLForConditionalGeneration.from_pretrained(
                path, dtype=dtype, attn_implementation="sdpa", output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
            )  # fmt: skip
        except Exception as error:  # safetensors, json and transformers each raise their own
            raise ValueError(f"{path} cannot be loaded: {_first_line(error)}") from error
    faults = {kind: sorted(map(str, keys)) for kind, keys in loading.items() if keys}
    if faults:
        found = "; ".join(f"{len(keys)} {kind}, first {keys[0]}" for kind, keys in faults.items())
        raise ValueError(f"{path} does not fit its config.json ({found}); set MODEL to a whole model.")
    embedding = model.get_input_embeddings().weight
    if model.config.tie_word_embeddings and model.lm_head.weight is not embedding:
        raise ValueError(
            f"{path} holds an {HEAD} unlike the embedding that config.json ties it to; set "
            "tie_word_embeddings to false there if the head was trained."
        )
    float32_rope(model)
    model = model if device is None else model.to(device)
    for name, parameter in model.named_parameters():
        if not is_finite(parameter):
            raise ValueError(not_finite(path, name))
    return model


def refuse_other_kinds(path: Path) -> None:
    """Raise ValueError for what is no full Qwen2-VL, by the configurations in its folder."""
    if (path / "adapter_config.json").exists():
        raise ValueError(
            f"{path} is a LoRA adapter; merge it into its base (peft: merge_and_unload), and set MODEL to "
            "the result."
        )
    try:
        config = json.loads((path / "config.json").read_bytes())
        if not isinstance(config, dict):
            raise TypeError("it is not a JSON object")
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} has no readable config.json: {_first_line(error)}") from error
    if (model_type := config.get("model_type")) != MODEL_TYPE:
        raise ValueError(f"{path} is a {model_type!r} model; set MODEL to a {MODEL_TYPE!r} one.")
    if config.get("quantization_config"):
        raise ValueError(f"{path} is quantized; set MODEL to the full weights, which training changes.")


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are: NaN and infinity show in the least and the largest, found in one pass."""
    return all(bool(extreme.isfinite()) for extreme in tensor.detach().aminmax())


def not_finite(folder: Path, name: str) -> str:
    return f"{folder} holds values that are not finite, first in {name}; take another."


def is_valid_model(folder: str | Path) -> str | None:
    """None when `folder` holds a finite Qwen2-VL that loads whole, with its processor; else the reason."""
    try:
        model = load_policy(folder, "auto")
        refuse_misfit(load_processor(folder), model.config)
    except ValueError as error:
        return str(error)
    return None


def float32_rope(model: torch.nn.Module) -> None:
    """Give each rotary embedding the exact float32 frequencies of its configuration again.

    For use after whatever may have cast buffers, such as `model.bfloat16()` (older DeepSpeed engines call it;
    0.19.8 casts parameters only). In bfloat16 the angles of Qwen2-VL-2B are 0.6 rad off at position 500.
    """
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            for name, exact in type(module)(module.config).named_buffers():
                setattr(module, name, exact.to(getattr(module, name).device))


@contextlib.contextmanager
def outside_zero_init() -> Iterator[None]:
    """Hide DeepSpeed's configuration from `from_pretrained` and the constructor.

    Inside zero.Init, transformers before 5.23 rounds the RoPE frequencies to bfloat16, and later ones save
    tensor names that others do not know. `deepspeed.initialize` partitions a loaded model just as well.
    """
    active = deepspeed_integration._hf_deepspeed_config_weak_ref
    deepspeed_integration.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if active is not None and active() is not None:
            deepspeed_integration.set_hf_deepspeed_config(active())


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """A load takes seconds, and its bar would tear the step line apart."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


# Where the tensors of a model folder lie


@dataclass(frozen=True)
class Slot:
    """The place of one tensor's bytes."""

    file: str
    start: int  # bytes from the beginning of the file
    shape: tuple[int, ...]
    dtype: torch.dtype


def weight_files(folder: Path) -> list[str]:
    """The names of the files that loading the folder reads weights from."""
    if (folder / SINGLE).is_file():
        return [SINGLE]
    if (folder / INDEX).is_file():
        try:
            files = sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reason = _first_line(error)
            raise ValueError(f"{folder / INDEX} is no index ({reason}); copy it again.") from error
        for file in files:
            if Path(file).name != file:  # the submission is written under these names
                raise ValueError(f"{folder / INDEX} names {file!r}, outside its folder; take the original.")
        return files
    raise ValueError(f"{folder} holds neither {SINGLE} nor {INDEX}; set MODEL to a model in such files.")


def read_header(path: Path) -> tuple[bytes, dict[str, dict]]:
    """The header of a safetensors file: its bytes (length, then JSON) and the entries of its tensors."""
    with open(path, "rb") as file:
        length = file.read(8)
        text = file.read(min(struct.unpack("<Q", length)[0], MAX_HEADER))
    entries = json.loads(text)
    entries.pop("__metadata__", None)
    return length + text, entries


def file_fault(path: Path) -> str | None:
    """Why a safetensors file cannot be read to its end; None when it can. Only its header is read."""
    try:
        header, entries = read_header(path)
        need = len(header) + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except Exception as error:  # missing, empty, or no safetensors file at all
        return f"{path} has no readable header ({type(error).__name__}); copy the model again."
    size = path.stat().st_size
    if size != need:
        return f"{path} has {size:,} bytes and its header says {need:,}; copy the model again."
    return None


def parameter_name(name: str) -> str:
    """The module's name of a tensor in a file, where names may be older (`visual.*`, `model.layers.*`)."""
    if name.startswith(("model.visual.", "model.language_model.")):
        return name
    return re.sub("^visual", "model.visual", re.sub("^model", "model.language_model", name))


def tensor_slots(folder: Path) -> dict[str, list[Slot]]:
    """Where each parameter lies, by the module's name. A tied head in a file is the embedding once more."""
    slots: dict[str, list[Slot]] = {}
    for file in weight_files(folder):
        header, entries = read_header(folder / file)
        for file_name, entry in entries.items():
            name = parameter_name(file_name)
            if entry["dtype"] not in DTYPES:
                known = ", ".join(DTYPES)
                raise ValueError(f"{file_name} in {folder} is {entry['dtype']}; set MODEL to one in {known}.")
            if name in slots:
                raise ValueError(f"{folder} holds {name} twice; set MODEL to a folder that holds it once.")
            start = len(header) + entry["data_offsets"][0]
            slots[name] = [Slot(file, start, tuple(entry["shape"]), DTYPES[entry["dtype"]])]
    if Qwen2VLConfig.from_pretrained(folder).tie_word_embeddings:
        slots[EMBEDDING] += slots.pop(HEAD, [])
    return slots


# Files that survive a power cut


def fsync(path: Path) -> None:
    """Force a file's contents, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_tree(folder: Path) -> None:
    """fsync for all files and folders in it, and for itself."""
    for directory, _, names in os.walk(folder):
        for name in (*names, "."):
            fsync(Path(directory, name))


def write_atomically(path: Path, content: bytes) -> None:
    """`path` holds its old content or the new one, whatever happens."""
    temporary(path).write_bytes(content)
    fsync(temporary(path))
    os.replace(temporary(path), path)
    fsync(path.parent)


def temporary(path: Path) -> Path:
    """Where write_atomically writes first; a kill leaves it behind."""
    return path.with_name(f".{path.name}.tmp")
