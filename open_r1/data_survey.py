"""What a data set holds, from its texts and image headers: answers, image sizes, prompt lengths."""

import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import PIL.Image
from transformers import Qwen2VLProcessor

from .data import CountingData
from .data_checks import map_rows
from .protocol import conversation

Found = tuple[list[str], list[str]]  # lines to show, faults to change
MANY = 11  # counts from here on share a column of the histogram


@dataclass(frozen=True)
class RowFacts:
    answer: int
    sizes: tuple[tuple[int, int], ...]  # width and height of each image in pixels, as stored
    tokens: int  # of the prompt in the grader's phrasing, image placeholders included


def row_facts(
    data: CountingData, processor: Qwen2VLProcessor, rows: Sequence[int], num_workers: int = 8
) -> list[RowFacts]:
    """The facts about each of `rows`, which check_rows found good. No image is decoded."""
    name = f"measuring {data.source}"
    found = map_rows(functools.partial(_facts, data, processor), rows, num_workers, name)
    return [facts for _, facts in found]


def _facts(data: CountingData, processor: Qwen2VLProcessor, row: int) -> RowFacts:
    columns = data.columns(row)
    sizes = tuple(PIL.Image.open(file).size for file in data.open_images(row))
    tokens = _text_tokens(processor, columns["question"], len(sizes))
    return RowFacts(columns["answer"], sizes, tokens + sum(image_tokens(processor, *size) for size in sizes))


@functools.lru_cache(maxsize=4096)  # counting questions repeat
def _text_tokens(processor: Qwen2VLProcessor, question: str, images: int) -> int:
    """The tokens of a prompt but for its images."""
    messages = conversation(question, images)
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return len(processor.tokenizer(text)["input_ids"]) - images


@functools.lru_cache(maxsize=4096)
def image_tokens(processor: Qwen2VLProcessor, width: int, height: int) -> int:
    """How many placeholders an image of this size in pixels gets."""
    images = processor.image_processor
    return images.get_number_of_image_patches(height, width) // images.merge_size**2


def longest_row(rows: Sequence[int], facts: Sequence[RowFacts]) -> int:
    """The row with the longest prompt."""
    return max(zip(rows, facts, strict=True), key=lambda one: one[1].tokens)[0]


def check_answers(facts: Sequence[RowFacts]) -> Found:
    """How often each count occurs. Policies undercount many objects: there must be some to learn from."""
    counts = Counter(min(fact.answer, MANY) for fact in facts)
    shares = [f"{n}{'+' * (n == MANY)}:{100 * counts[n] / len(facts):.0f}%" for n in sorted(counts)]
    above_six = sum(fact.answer > 6 for fact in facts) / len(facts)
    return [f"{' '.join(shares)}, above six {100 * above_six:.0f}% of the rows"], []


def check_images(data: CountingData, processor: Qwen2VLProcessor, facts: Sequence[RowFacts]) -> Found:
    sizes = sorted({size for fact in facts for size in fact.sizes}, key=math.prod)
    if not sizes:
        return [], [f"{data.source} has no images: name their column image or images"]
    of_row = _range(len(fact.sizes) for fact in facts)
    pixels = " to ".join(dict.fromkeys(f"{width} x {height}" for width, height in (sizes[0], sizes[-1])))
    tokens = _range(image_tokens(processor, *size) for size in sizes)
    return [f"{of_row} a row, {pixels} pixels, {tokens} tokens each"], []


def check_prompts(
    data: CountingData, rows: Sequence[int], facts: Sequence[RowFacts], limit: int, new_tokens: int
) -> Found:
    """Do prompt and completion fit into the `limit` of positions that the model knows?"""
    lengths = [fact.tokens for fact in facts]
    long = [row for row, length in zip(rows, lengths, strict=True) if length + new_tokens > limit]
    median = sorted(lengths)[len(lengths) // 2]
    line = f"{_range(lengths)} tokens, median {median:,}; with {new_tokens} new ones, {len(long)} rows "
    line += f"exceed the model's {limit:,}"
    if not long:
        return [line], []
    return [line], [
        f"{len(long)} prompts of {data.source} (first row {long[0]}) and {new_tokens} new tokens exceed the "
        f"model's {limit:,}: set --max_pixels lower, or leave these rows out"
    ]


def _range(values: Iterable[int]) -> str:
    values = sorted(set(values))
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"
