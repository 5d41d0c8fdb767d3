"""LoRA (arXiv 2106.09685): a linear layer W gets the update scale * B A beside it, and only that is trained.

peft makes the layers; the project's own forward (layers.py) asks `active_adapter` for the update. The rollout
copy and the submission are plain models whose weights are W + scale * B A, computed in float32 and rounded
once. The reference of a KL term is the policy with its adapters off.

Legend
  r  rank      I, O  inputs and outputs of a linear layer
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

if TYPE_CHECKING:
    from .arguments import ModelArguments

NAME = "default"  # of the one adapter, as peft calls it
FILE = "adapter_model.safetensors"  # peft's own name
PREFIX = "base_model.model."  # of the tensors in peft's files
TEXT = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
VISION = ("qkv", "proj", "fc1", "fc2", "mlp.0", "mlp.2")  # the last two are the merger's
TIED = ("lm_head", "embed_tokens")
TOWERS = {"language_model.layers.": TEXT, "visual.blocks.": VISION, "visual.merger.": VISION}


def rules(model: "ModelArguments") -> Iterator[tuple[bool, str]]:
    """As flag_rules.rules: what must not be, each with its sentence."""
    asked = _asked(model)
    given = f"--lora_target_modules {' '.join(asked)}"
    tied = bool(set(asked) & set(TIED))
    yield tied, f"{given}: the head and the embedding are one tensor (tied), without adapter; leave them out"
    unknown = bool(set(asked) - {*TEXT, *VISION, *TIED})
    names = f"{' '.join(TEXT)}, and of the vision tower {' '.join(VISION)}"
    yield unknown, f"{given}: set some of {names}, or leave it out for all"
    of_vision = bool(set(asked) & set(VISION))
    yield (
        of_vision and not model.lora_vision,
        f"{given}: {' '.join(VISION)} are of the vision tower; set --lora_vision true too",
    )
    yield (
        model.lora_vision and bool(asked) and not of_vision,
        f"--lora_vision true with {given}: no layer of the vision tower; add some of {' '.join(VISION)}",
    )
    yield model.lora_r < 1, f"--lora_r {model.lora_r}: set 1 or more"
    yield not model.lora_alpha > 0, f"--lora_alpha {model.lora_alpha}: set it above 0"
    yield (
        model.lora_dropout != 0,
        f"--lora_dropout {model.lora_dropout}: completions come from the merged weights, which know no "
        "dropout, and the update must see the same policy; set 0",
    )
    yield (
        model.lora_vision and model.freeze_vision_tower,
        "--lora_vision true and --freeze_vision_tower true: set one of them",
    )
    for one in fields(model):
        if one.name.startswith("lora_") or one.name == "use_rslora":
            without = not model.use_peft and getattr(model, one.name) != one.default
            yield without, f"--{one.name} does nothing without --use_peft true: set both or none"


def targets(shapes: dict[str, tuple[int, ...]], model: "ModelArguments") -> list[str]:
    """Names of the linear layers that get adapters, from the shapes of the model's parameters."""
    asked = _asked(model)
    return [
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        for tower in TOWERS
        if len(shape) == 2  # neither norms nor the patches' convolution
        and tower in name
        and (model.lora_vision or TOWERS[tower] is TEXT)
        and (not asked or any(name.endswith(f".{one}.weight") for one in asked))
    ]


def trained_parameters(shapes: dict[str, tuple[int, ...]], model: "ModelArguments") -> int:
    """How many numbers are trained."""
    if model.use_peft:
        return sum(model.lora_r * sum(shapes[f"{name}.weight"]) for name in targets(shapes, model))
    frozen = "model.visual." if model.freeze_vision_tower else " "
    return sum(torch.Size(shape).numel() for name, shape in shapes.items() if not name.startswith(frozen))


def add_adapters(policy: nn.Module, model: "ModelArguments", seed: int) -> None:
    """Puts adapters beside the policy's linear layers, in place, and freezes all else. B is 0: the policy is
    the base. A's numbers follow from `seed` alone, on any rank.

    The adapters are float32, whatever the frozen weights are (DeepSpeed makes bf16 copies and float32 masters
    of them). So on a GPU the base is bf16, as its file is: nothing is ever added to it in place.
    """
    from peft import LoraConfig, inject_adapter_in_model

    names = targets({name: tuple(p.shape) for name, p in policy.named_parameters()}, model)
    config = LoraConfig(
        r=model.lora_r, lora_alpha=model.lora_alpha, lora_dropout=0.0, target_modules=names,
        use_rslora=model.use_rslora,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, policy)
    for parameter in trained(policy).values():
        parameter.data = parameter.data.float()
    # Of a ZeRO-3 leaf module whose input needs no gradient, those of its weights are reduced too soon.
    first = [policy.get_input_embeddings()] + [policy.model.visual.patch_embed] * model.lora_vision
    for module in first:
        module.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
    load_state_dict = policy.load_state_dict
    # DeepSpeed restores its checkpoint through it, and that holds the adapters alone.
    policy.load_state_dict = lambda state, strict=True, **more: load_state_dict(state, strict=False, **more)


def has_adapters(policy: nn.Module) -> bool:
    return hasattr(policy, "peft_config")


def trained(policy: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}


Adapter = tuple[nn.Parameter, nn.Parameter, float] | tuple[()]  # A [r, I], B [O, r] and the scale, or none


def adapter_of(layer: nn.Module) -> Adapter:
    """What stands beside a layer."""
    if not hasattr(layer, "lora_A"):
        return ()
    return layer.lora_A[NAME].weight, layer.lora_B[NAME].weight, layer.scaling[NAME]


def active_adapter(layer: nn.Module) -> Adapter:
    """adapter_of, while adapters are on."""
    return () if getattr(layer, "disable_adapters", False) else adapter_of(layer)


@contextmanager
def adapters_off(policy: nn.Module) -> Iterator[None]:
    """Within it the policy is its base. Not for gradients: peft freezes adapters that are off."""
    layers = [module for module in policy.modules() if hasattr(module, "lora_A")]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def update(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """What an adapter adds to its layer's weight, [O, I] in float32."""
    return scale * (b.float() @ a.float())


def plain_parameters(policy: nn.Module) -> Iterator[tuple[str, nn.Parameter, Adapter]]:
    """The base's parameters by the base's names, each with what stands beside it."""
    adapters = {f"{name}.base_layer.weight": adapter_of(module) for name, module in policy.named_modules()}
    for name, parameter in policy.named_parameters():
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), parameter, adapters.get(name, ())


# --- checkpoints: peft's files


def write_adapters(policy: nn.Module, values: dict[str, Tensor], folder: Path) -> None:
    """`values` by the names of `trained`; PeftModel.from_pretrained reads the folder too."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{PREFIX}{_in_file(name)}": value.contiguous() for name, value in values.items()}
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    policy.peft_config[NAME].save_pretrained(folder)


@torch.no_grad()
def read_adapters(policy: nn.Module, folder: Path) -> None:
    """Overwrites the adapters. ValueError where the folder's are of other layers or another rank."""
    tensors, wanted = load_file(folder / FILE), trained(policy)
    shapes = {name.removeprefix(PREFIX): value.shape for name, value in tensors.items()}
    if shapes != {_in_file(name): parameter.shape for name, parameter in wanted.items()}:
        raise ValueError(f"{folder} holds other adapters than the --lora_… flags ask for; set another OUT")
    for name, parameter in wanted.items():
        parameter.copy_(tensors[f"{PREFIX}{_in_file(name)}"])


def _in_file(name: str) -> str:
    return name.replace(f".{NAME}.", ".")


def _asked(model: "ModelArguments") -> list[str]:
    asked = model.lora_target_modules or []  # TRL makes a list of one a string
    return [asked] if isinstance(asked, str) else list(asked)
