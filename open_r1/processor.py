"""The checkpoint's own processor, and whether it fits the model and a question."""

import os
from collections.abc import Sequence
from pathlib import Path

import PIL.Image
from torch import Tensor
from transformers import AutoProcessor, Qwen2VLConfig, Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from open_r1.images import DataError, first_line
from open_r1.protocol import MAX_NEW_TOKENS, conversation

COPY_PROCESSOR = "copy tokenizer, processor and chat template of the base model into it"


def is_main_process() -> bool:
    """Whether this process is the one that prints and shows progress."""
    return os.environ.get("RANK", "0") == "0"


def load_processor(
    path: str | Path, min_pixels: int | None = None, max_pixels: int | None = None
) -> Qwen2VLProcessor:
    """The checkpoint's processor, padding on the left. The main process says if the limits are not its own.

    Raises DataError when the folder has none that loads, and when the limits leave no size.
    """
    try:
        processor = AutoProcessor.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # its files can be wrong in as many ways as there are files
        reason = first_line(error)
        raise DataError(f"{path} has no processor that loads ({reason}): {COPY_PROCESSOR}") from error
    if not isinstance(processor, Qwen2VLProcessor):
        raise DataError(f"{path} has a {type(processor).__name__}, no Qwen2VLProcessor: {COPY_PROCESSOR}")
    try:
        tokens, pixels = processor.tokenizer("3")["input_ids"], _pixels_of_one_image(processor)
    except Exception as error:  # and hold values of any kind
        reason = first_line(error)
        raise DataError(f"{path} has a processor that fails ({reason}): {COPY_PROCESSOR}") from error
    if not tokens:  # transformers makes up an empty one
        raise DataError(f"{path} has no tokenizer: {COPY_PROCESSOR}")
    if not pixels.isfinite().all():
        raise DataError(f"{path} has a processor that makes pixels which are not finite: {COPY_PROCESSOR}")
    processor.tokenizer.padding_side = "left"
    own = processor.image_processor.size["shortest_edge"], processor.image_processor.size["longest_edge"]
    low, high = own[0] if min_pixels is None else min_pixels, own[1] if max_pixels is None else max_pixels
    if not 0 < low <= high:
        raise DataError(f"min_pixels {low} and max_pixels {high} leave no size for an image")
    if (low, high) != own:
        # Built anew: a size that is set later, or beside the limits in the file, is ignored by some versions.
        kind = type(processor.image_processor)
        processor.image_processor = kind.from_pretrained(path, min_pixels=low, max_pixels=high)
        if is_main_process():
            print(
                f"Images are trained on at {low} to {high} pixels, but the grader uses the base's processor "
                f"({own[0]} to {own[1]} pixels): training and grading then see different images."
            )
    return processor


def _pixels_of_one_image(processor: Qwen2VLProcessor) -> Tensor:
    side = smallest_side(processor)
    image = PIL.Image.new("RGB", (side, side))
    return processor.image_processor(images=[image], return_tensors="pt")["pixel_values"]  # [patches, values]


def smallest_side(processor: Qwen2VLProcessor) -> int:
    """The side in pixels of what one image token stands for."""
    return processor.image_processor.patch_size * processor.image_processor.merge_size


def refuse_special_tokens(question: str, processor: Qwen2VLProcessor) -> None:
    """Raise DataError when the question spells one: <|image_pad|> would stand for one more image."""
    for token in {processor.image_token, processor.video_token, *processor.tokenizer.all_special_tokens}:
        if token in question:
            raise DataError(f"the question holds {token!r}, which is read as a special token")


def refuse_misfit(processor: Qwen2VLProcessor, config: Qwen2VLConfig) -> None:
    """Raise DataError for a processor without a chat template, and for another model's tokenizer: its ids
    would stand for something else."""
    if not processor.chat_template:
        raise DataError(f"the processor has no chat template: {COPY_PROCESSOR}")
    tokens, size = len(processor.tokenizer), config.get_text_config().vocab_size
    if tokens > size:
        raise DataError(f"the tokenizer has {tokens} tokens and the model {size}: {COPY_PROCESSOR}")
    if processor.image_token_id != config.image_token_id:
        raise DataError(
            f"{processor.image_token} is token {processor.image_token_id} of the tokenizer and "
            f"{config.image_token_id} in config.json: {COPY_PROCESSOR}"
        )


def refuse_long_prompt(question: str, sizes: Sequence[tuple[int, int]], processor: Qwen2VLProcessor) -> None:
    """Raise DataError when the prompt (images of these widths and heights, question) and an answer to it are
    longer than what the model was made for."""
    vision, limit = processor.image_processor, processor.tokenizer.model_max_length - MAX_NEW_TOKENS
    side = smallest_side(processor)
    pixels = (vision.size["shortest_edge"], vision.size["longest_edge"])
    resized = [smart_resize(height, width, side, *pixels) for width, height in sizes]
    tokens = sum(height * width // side**2 for height, width in resized)
    if 2 * (tokens + len(question.encode())) < limit:  # a token has a byte at least: no need to count
        return
    messages = conversation(question, len(sizes))
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens += len(processor.tokenizer(text)["input_ids"]) - len(sizes)
    if tokens > limit:
        raise DataError(
            f"its prompt of {tokens:,} tokens and an answer of {MAX_NEW_TOKENS} are more than the "
            f"{limit + MAX_NEW_TOKENS:,} of the model: shorten the question, or set --max_pixels lower"
        )
