"""Whether a model's folder can be trained from, told without loading it: configuration, safetensors headers,
processor, generation settings, chat template.

Each check returns (lines to show, faults to change).
"""

from pathlib import Path

import PIL.Image
import torch
from safetensors import safe_open
from transformers import GenerationConfig, Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLProcessor

from .arguments import GRPOArguments
from .checkpoint import (
    EMBEDDING,
    HEAD,
    Slot,
    file_fault,
    is_finite,
    not_finite,
    outside_zero_init,
    parameter_name,
    refuse_other_kinds,
    tensor_slots,
    weight_files,
)
from .images import first_line
from .protocol import EVAL_TEMPLATE, conversation
from .rollout import unsupported

Found = tuple[list[str], list[str]]  # lines, faults
# Settings of a generation_config that only sampling reads, with the values that leave it as it is.
SAMPLING_SETTINGS = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}  # fmt: skip


def check_config(base: Path) -> Qwen2VLConfig:
    """The configuration. Raises ValueError for another kind of model, or none, and where no model can be made
    of it."""
    refuse_other_kinds(base)
    try:
        config = Qwen2VLConfig.from_pretrained(base)
        parameter_shapes(config)
        _check_rope(config.get_text_config())
    except Exception as error:  # whatever a value of another kind, or below 1, leads to
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"no model can be made of {base}/config.json ({reason}); copy it again") from error
    return config


def _check_rope(text) -> None:
    """Raises ValueError for rotary settings that a model is made of, and that fail or give NaN in its first
    forward pass."""
    rope, half = text.rope_parameters, text.hidden_size // text.num_attention_heads // 2
    theta, sections = rope["rope_theta"], rope["mrope_section"]
    if not 0 < theta < float("inf"):
        raise ValueError(f"rope_theta {theta} is not above 0")
    if len(sections) != 3 or min(sections) < 0 or sum(sections) != half:
        raise ValueError(f"mrope_section {sections} is not three parts of the {half} angles of a head")


# --- Weights


def parameter_shapes(config: Qwen2VLConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model by its module's name; a tied head is the embedding and is not listed."""
    with outside_zero_init(), torch.device("meta"):
        model = Qwen2VLForConditionalGeneration(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def check_weights(base: Path, config: Qwen2VLConfig) -> Found:
    """Are all tensors of the configuration there, in their shapes, in files of their full length, and finite?
    Values are read once, tensor by tensor."""
    faults = [fault for file in weight_files(base) if (fault := file_fault(base / file))]
    if faults:
        return [], faults
    slots, shapes = tensor_slots(base), parameter_shapes(config)
    wrong = sorted(n for n in slots.keys() & shapes.keys() if any(s.shape != shapes[n] for s in slots[n]))
    found = (
        ("are missing", sorted(shapes.keys() - slots.keys())),
        ("are none of its config.json", sorted(slots.keys() - shapes.keys())),
        ("have another shape than its config.json says", wrong),
    )
    faults = [
        f"{base}: {len(names)} tensors {what}, first {names[0]}; set MODEL to a whole model"
        for what, names in found
        if names
    ]
    tied = slots.get(EMBEDDING, []) if config.tie_word_embeddings else []
    if len(tied) > 1 and not _same(base, tied):
        faults.append(
            f"{base}: {HEAD} is not the embedding that config.json ties it to, and would be lost; set MODEL "
            'to a model with a tied head (or "tie_word_embeddings": false there, if it was trained apart)'
        )
    faults += _first_not_finite(base)
    dtypes = sorted({str(slot.dtype).removeprefix("torch.") for places in slots.values() for slot in places})
    size = sum((base / file).stat().st_size for file in weight_files(base))
    head = "tied to the embedding" if config.tie_word_embeddings else "not tied"
    line = f"{'/'.join(dtypes)}, {size / 1e9:,.2f} GB, output head {head}; all {len(shapes)} tensors there"
    return ([] if faults else [line]), faults


def _first_not_finite(base: Path) -> list[str]:
    for file in weight_files(base):
        with safe_open(base / file, "pt") as tensors:
            for name in tensors.keys():
                if not is_finite(tensors.get_tensor(name)):
                    return [not_finite(base, parameter_name(name))]
    return []


def _same(folder: Path, slots: list[Slot]) -> bool:
    """Whether these places hold the same bytes."""
    first, second = slots
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    left = torch.Size(first.shape).numel() * first.dtype.itemsize
    with open(folder / first.file, "rb") as one, open(folder / second.file, "rb") as other:
        one.seek(first.start)
        other.seek(second.start)
        while left:
            chunk = min(left, 2**24)
            if one.read(chunk) != other.read(chunk):
                return False
            left -= chunk
    return True


# --- Processor


def check_processor(base: Path, processor, config: Qwen2VLConfig) -> Found:
    """Do processor and model mean the same by tokens and patches?"""
    tokenizer, images, vision = processor.tokenizer, processor.image_processor, config.vision_config
    vocabulary = config.get_text_config().vocab_size
    pairs = [  # what, the processor's, the model's
        ("image token", tokenizer.convert_tokens_to_ids(processor.image_token), config.image_token_id),
        ("video token", tokenizer.convert_tokens_to_ids(processor.video_token), config.video_token_id),
        ("patch size", images.patch_size, vision.patch_size),
        ("merge size", images.merge_size, vision.spatial_merge_size),
        ("frames a patch", images.temporal_patch_size, vision.temporal_patch_size),
    ]
    faults = [
        f"{base}: the {what} is {ours} for the processor and {theirs} for the model; take both from one model"
        for what, ours, theirs in pairs
        if ours != theirs
    ]
    if len(tokenizer) > vocabulary:
        faults.append(
            f"{base}: the tokenizer has {len(tokenizer):,} tokens and the model {vocabulary:,}; take both "
            "from one model"
        )
    low, high = images.size["shortest_edge"], images.size["longest_edge"]
    side = images.patch_size * images.merge_size
    tokens = f"{-(-low // side**2):,} to {high // side**2:,} tokens"
    return [f"shows images at {low:,} to {high:,} pixels, which are {tokens}"], faults


# --- Generation settings


def check_generation(base: Path, config: Qwen2VLConfig, args: GRPOArguments) -> Found:
    """What generation_config.json brings, and who follows it."""
    try:
        settings = GenerationConfig.from_pretrained(base)
    except OSError:  # as from_pretrained of the model does
        settings = GenerationConfig.from_model_config(config)
    except Exception as error:  # a setting of another kind than it should be
        return [], [_not_used(base, first_line(error))]
    ends, vocabulary = settings.eos_token_id, config.get_text_config().vocab_size
    ends = ends if isinstance(ends, list) else [ends] * (ends is not None)
    if not all(isinstance(one, int) and 0 <= one < vocabulary for one in ends):
        return [], [_not_used(base, f"eos_token_id {settings.eos_token_id} is none of {vocabulary:,} tokens")]
    for name in (*SAMPLING_SETTINGS, "repetition_penalty", "num_beams"):
        if not isinstance(value := getattr(settings, name, None), int | float | None):
            return [], [_not_used(base, f"{name} {value!r} is no number")]
    faults = []
    if not ends:
        faults.append(
            f"{base}/generation_config.json names no eos_token_id: completions would never end; set it there"
        )
    if args.rollout_engine == "fast" and (fault := unsupported(settings)):
        faults.append(fault)
    brought = {
        name: value
        for name, neutral in SAMPLING_SETTINGS.items()
        if (value := getattr(settings, name, None)) not in (None, neutral)
    }
    lines = [
        f"rollouts: --temperature {args.temperature:g} --top_p {args.top_p:g} --top_k {args.top_k or 0}"
        + (f" --min_p {args.min_p:g}" if args.min_p else "")
        + "; validation and grader: greedy"
    ]
    if brought:
        listed = ", ".join(f"{name} {value:g}" for name, value in brought.items())
        trap = " (greedy: no learning)" if brought.get("top_k") == 1 else ""
        lines.append(f"not used: the model's own {listed}{trap}")
    penalty = settings.repetition_penalty or 1.0
    if penalty != 1:
        lines.append(f"its repetition_penalty {penalty:g} acts in validation and the grader, not in rollouts")
    return lines, faults


def _not_used(base: Path, reason: str) -> str:
    return f"{base}/generation_config.json cannot be used ({reason}); take the public model's"


# --- Chat template


def check_template(base: Path, processor: Qwen2VLProcessor) -> Found:
    """The grader's prompt through the chat template, and the placeholders that an image gets in it."""
    question, picture = "How many items are there in the image?", PIL.Image.new("RGB", (480, 320))
    messages = conversation(question)
    try:
        text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        bare = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
    except Exception as error:  # none there, or what jinja raises for a broken one
        reason = first_line(error)
        return [], [f"{base} has no chat template that renders the grader's prompt ({reason})"]
    faults, where = [], f"the chat template of {base}"
    if text.count(processor.image_token) != 1:
        faults.append(f"{where} writes {text.count(processor.image_token)} image tokens for one image")
    if messages[0]["content"][1]["text"] not in text:
        faults.append(f"{where} does not write the question as it is")
    if text == bare:
        faults.append(f"{where} does not open the answer's turn (add_generation_prompt changes nothing)")
    if faults:
        return [], [f"{fault}; take the template of the public model" for fault in faults]
    inputs = processor(text=[text], images=[picture], return_tensors="pt")
    grid = inputs["image_grid_thw"][0].tolist()
    need = grid[0] * grid[1] * grid[2] // processor.image_processor.merge_size**2
    token = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    placed = int((inputs["input_ids"] == token).sum())
    if placed != need:
        faults.append(f"an image of {grid} patches gets {placed} placeholders, but needs {need}: {where}")
    start, _, _ = EVAL_TEMPLATE.partition("{question}")[2].partition(" in <think>")
    short = text.strip().replace(EVAL_TEMPLATE.format(question=question), f"{question}{start} …")
    short = short.replace("\n", "⏎ ").replace(processor.image_token, f"{processor.image_token}×{placed}")
    return [short, f"(480 x 320 pixels need {need} image tokens and get them)"], faults
