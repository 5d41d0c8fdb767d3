"""Rows -> prompts.

A data set is read lazily: nothing is mapped, re-encoded or decoded up front. data_loader.py draws rows and
encodes them ahead of time in worker processes; data_checks.py looks for rows that cannot be trained on.

Shapes: P tokens in the prompt (image placeholders expanded), N patches of all its images,
F = channels x temporal patch x patch x patch values in a patch.
"""

import json
import os
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import PIL.Image
import pyarrow as pa
from datasets import Dataset, DatasetDict, Image, load_dataset, load_from_disk
from datasets.features.features import require_decoding
from torch import Tensor
from transformers import AutoProcessor, Qwen2VLConfig, Qwen2VLModel, Qwen2VLProcessor

from open_r1.protocol import EVAL_TEMPLATE, TRAIN_TEMPLATE, conversation, extract_answer

# Where a row has both columns, the first counts.
IMAGE_COLUMNS = ("image", "images")
QUESTION_COLUMNS = ("problem", "question")
SOLUTION_COLUMNS = ("solution", "answer")


class DataError(ValueError):
    """The data cannot be used as it is; the message says which row or path, and what to do."""


def is_main_process() -> bool:
    """Whether this process is the one that prints and shows progress."""
    return os.environ.get("RANK", "0") == "0"


# --- Rows


def gold_answer(solution: Any) -> int:
    """The count in a solution: `<answer> 3 </answer>`, "3" or 3. Raises DataError for anything else."""
    count = None
    if isinstance(solution, str):
        digits = re.fullmatch(r"\s*(\d+)\s*", solution)
        count = int(digits[1]) if digits else extract_answer(solution)
    elif isinstance(solution, int) and not isinstance(solution, bool):
        count = solution
    elif isinstance(solution, float) and solution.is_integer():
        count = int(solution)
    if count is None or count < 0:
        raise DataError(f"solution {solution!r} is not a count, as '<answer> 3 </answer>', '3' or 3 is")
    return count


class CountingData:
    """Rows of images, a question and a count, read only when asked for.

    `texts[row]` is the row without images. `images[row]` is its encoded images, a list of paths or an Arrow
    table of one row; None where no row has any. Picklable: worker processes open the same files again.
    `files` are the real paths read; `fingerprint` is the library's name for the content, if it has one.
    """

    def __init__(
        self,
        source: str,
        texts: Sequence[dict],
        images: Sequence | None,
        *,
        columns: Sequence[str],
        folder: Path,
        files: Sequence[str],
        fingerprint: str | None,
    ):
        self.source, self.folder, self.fingerprint = source, folder, fingerprint
        self.files = frozenset(map(os.path.realpath, files))
        self._texts, self._images = texts, images
        self.question_column = _first_of(QUESTION_COLUMNS, columns, source)
        self.solution_column = _first_of(SOLUTION_COLUMNS, columns, source)

    def __len__(self) -> int:
        return len(self._texts)

    def columns(self, row: int) -> dict[str, Any]:
        """The row without its images, plus question (str), solution (as it is) and answer (int).

        Raises DataError (which does not name the row) when the question is empty or the solution no count.
        """
        columns = dict(self._texts[row])
        question, solution = columns[self.question_column], columns[self.solution_column]
        if not isinstance(question, str) or not question.strip():
            raise DataError(f"{self.question_column} {question!r} is not a question")
        return columns | {"question": question, "solution": solution, "answer": gold_answer(solution)}

    def open_images(self, row: int) -> Iterator[BinaryIO]:
        """The row's encoded images, each as an open file of which nothing is read yet."""
        values = [] if self._images is None else _encoded_images(self._images[row])
        for number, value in enumerate(values, start=1):
            if value is None:
                raise DataError(f"image {number} has neither bytes nor a path")
            if isinstance(value, pa.Buffer):
                yield _BufferFile(value)
                continue
            path = self.folder / value
            if not path.is_file():
                raise DataError(f"image {number}: there is no file {path}")
            with open(path, "rb") as file:
                yield file

    def images(self, row: int) -> list[PIL.Image.Image]:
        """The row's images, decoded, in RGB. Raises DataError (which does not name the row)."""
        return [decode(file) for file in self.open_images(row)]


class _BufferFile(pa.BufferReader):
    """As other files do, it allows seeking past the end, which Pillow tries on short files."""

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = (0, self.tell(), self.size())[whence]
        return super().seek(min(start + offset, self.size()))


def decode(file: BinaryIO) -> PIL.Image.Image:
    """One image as the datasets library, and so the grader, decodes it (turned as its EXIF says), in RGB."""
    try:
        return Image().decode_example({"path": None, "bytes": file.read()}).convert("RGB")
    except Exception as error:  # what Pillow raises for a broken file depends on the format
        raise DataError(f"an image cannot be decoded: {describe(error)}") from error


def describe(error: Exception) -> str:
    if isinstance(error, PIL.UnidentifiedImageError):  # its own text is the address of a buffer
        return "its format is unknown"
    return str(error) or type(error).__name__


def _encoded_images(value: pa.Table | list[str | None]) -> list[pa.Buffer | str | None]:
    """Bytes or path of each image. Bytes are not copied: reading a header touches the first pages only."""
    if isinstance(value, list):
        return value
    scalar = value.column(0)[0]
    if not scalar.is_valid:
        return []
    return [_encoded(item) for item in (scalar.values if isinstance(scalar, pa.ListScalar) else [scalar])]


def _encoded(scalar: pa.Scalar) -> pa.Buffer | str | None:
    if isinstance(scalar, pa.StructScalar) and scalar.is_valid:  # how datasets stores an Image: {bytes, path}
        scalar = scalar["bytes"] if scalar["bytes"].is_valid else scalar["path"]
    if scalar.is_valid and not isinstance(scalar, pa.StringScalar | pa.LargeStringScalar):
        return scalar.as_buffer()
    return scalar.as_py()


def _first_of(names: Sequence[str], columns: Sequence[str], source: str) -> str:
    for name in names:
        if name in columns:
            return name
    raise DataError(f"{source} has no column {' or '.join(names)}; it has {', '.join(columns)}")


# --- Opening a data set


def load_rows(source: str | Path, split: str = "train", config: str | None = None) -> CountingData:
    """Open a save_to_disk folder, parquet or JSONL (a folder or a file), or else a data set of the hub.

    `split` picks among several splits; a source with only one gives that one. Image paths in a JSONL file
    are relative to it. Raises DataError when there is no such data, form, split or column.
    """
    source = str(source)
    path = Path(source).expanduser()
    if not path.exists():
        return _from_arrow(source, _from_hub(source, config), split, folder=Path())
    path = path.resolve()
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _from_arrow(source, load_from_disk(path), split, folder=path)
    if files := _files_of(path, ".parquet", split):
        data = load_dataset("parquet", data_files=[str(file) for file in files])
        return _from_arrow(source, data, split, folder=files[0].parent)
    if files := _files_of(path, ".jsonl", split):
        return _from_jsonl(source, files)
    raise DataError(f"{source} is neither a save_to_disk folder nor parquet nor JSONL")


SHARD = re.compile(r"[-_.]?\d+(-of-\d+)?(-[0-9a-f]{16})?$")  # the end of a name such as train-00000-of-00002


def _files_of(path: Path, suffix: str, split: str) -> list[Path]:
    """The files of one split: in the folder or its data/ they are named after it, else its subfolder is."""
    if path.is_file():
        return [path] if path.suffix == suffix else []
    splits: dict[str, list[Path]] = {}
    for file in sorted(path.glob("*" + suffix)) or sorted(path.glob("data/*" + suffix)):
        splits.setdefault(SHARD.sub("", file.stem), []).append(file)
    if not splits:
        for file in sorted(path.glob("*/*" + suffix)):
            splits.setdefault(file.parent.name, []).append(file)
    return _pick(splits, split, str(path)) if splits else []


def _pick(splits: dict[str, Any], split: str, source: str) -> Any:
    if split not in splits and len(splits) > 1:
        raise DataError(f"{source} has no split {split!r}; it has {', '.join(splits)}")
    return splits[split] if split in splits else next(iter(splits.values()))


def _from_hub(source: str, config: str | None) -> DatasetDict:
    looks_like_path = source.startswith(("/", ".", "~")) or source.count(os.sep) > 1
    if looks_like_path or source.endswith((".jsonl", ".parquet")):
        raise DataError(f"there is no data at {source}")
    try:
        return load_dataset(source, config)
    except OSError as error:
        raise DataError(f"there is no data at {source}, and none came from the hub: {error}") from error


def _from_arrow(source: str, data: Dataset | DatasetDict, split: str, folder: Path) -> CountingData:
    if isinstance(data, dict):
        data = _pick(data, split, source)
    files, fingerprint = [file["filename"] for file in data.cache_files], data._fingerprint
    data = data.with_format(None)
    image_column = next((name for name in IMAGE_COLUMNS if name in data.column_names), None)
    decoded = {name for name, feature in data.features.items() if require_decoding(feature)}
    others = [name for name in data.column_names if name != image_column and name not in decoded]
    return CountingData(
        source,
        data.select_columns(others),
        data.select_columns(image_column).with_format("arrow") if image_column else None,
        columns=others,
        folder=folder,
        files=files,
        fingerprint=fingerprint,
    )


def _from_jsonl(source: str, files: list[Path]) -> CountingData:
    rows, images = [], []
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
            if not line.strip():
                continue
            try:
                row = dict(json.loads(line))
            except (ValueError, TypeError) as error:
                raise DataError(f"{file}, line {number} is not a JSON object: {error}") from error
            value = next((row.pop(name) for name in IMAGE_COLUMNS if name in row), None)
            values = value if isinstance(value, list) else [] if value is None else [value]
            images.append([str(file.parent / path) if isinstance(path, str) else None for path in values])
            rows.append(row)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return CountingData(
        source,
        [{name: row.get(name) for name in columns} for row in rows],  # as a table would have it
        images,
        columns=columns,
        folder=Path(),
        files=[str(file) for file in files],
        fingerprint=None,
    )


# --- Prompts


@dataclass
class Prompt:
    """One encoded prompt."""

    row: int  # index in the data set
    input_ids: Tensor  # [P] int64
    position_ids: Tensor  # [3, P] int64, M-RoPE positions
    next_position: int  # M-RoPE position of a completion's first token
    pixel_values: Tensor | None  # [N, F] float32
    image_grid_thw: Tensor | None  # [images, 3] int64, in patches
    columns: dict[str, Any]  # CountingData.columns: what rewards get
    images: list[PIL.Image.Image] | None  # only with keep_images


def load_processor(
    path: str | Path, min_pixels: int | None = None, max_pixels: int | None = None
) -> Qwen2VLProcessor:
    """The checkpoint's processor, padding on the left. The main process says if the limits are not its own.

    Raises DataError when the limits leave no size.
    """
    processor = AutoProcessor.from_pretrained(path)
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


def refuse_special_tokens(question: str, processor: Qwen2VLProcessor) -> None:
    """Raise DataError when the question spells one: <|image_pad|> would stand for one more image."""
    for token in {processor.image_token, processor.video_token, *processor.tokenizer.all_special_tokens}:
        if token in question:
            raise DataError(f"the question holds {token!r}, which is read as a special token")


class _Positions:
    """The library's own M-RoPE positions, without a model: they depend on the configuration alone."""

    get_rope_index = Qwen2VLModel.get_rope_index
    get_vision_position_ids = Qwen2VLModel.get_vision_position_ids

    def __init__(self, config: Qwen2VLConfig):
        self.config = config


class PromptEncoder:
    """Encodes rows; picklable, so that worker processes can.

    A share `prompt_mix` of the prompts has R1-V's phrasing, the others have the grader's.
    """

    def __init__(
        self,
        processor: Qwen2VLProcessor,
        config: Qwen2VLConfig,
        *,
        prompt_mix: float,
        keep_images: bool,
        seed: int,
    ):
        self.processor, self._positions = processor, _Positions(config)
        self.prompt_mix, self.keep_images, self.seed = prompt_mix, keep_images, seed

    def template(self, row: int, step: int) -> str:
        """The phrasing of a row. A function of (seed, row, step): a resumed run asks the same questions."""
        chance = random.Random(f"{self.seed} {row} {step}").random()
        return TRAIN_TEMPLATE if chance < self.prompt_mix else EVAL_TEMPLATE

    def encode(self, data: CountingData, row: int, template: str | None = None, step: int = 0) -> Prompt:
        """Decode and encode one row, in `template` or else in its phrasing of that `step`.

        Raises DataError, naming the row, when an image, the question or the solution cannot be used.
        """
        try:
            columns, images = data.columns(row), data.images(row)
            refuse_special_tokens(columns["question"], self.processor)
        except DataError as error:
            raise DataError(f"row {row} of {data.source}: {error}") from error
        messages = conversation(columns["question"], len(images), template or self.template(row, step))
        text = self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = self.processor(text=[text], images=images or None, return_tensors="pt")
        grid = inputs.get("image_grid_thw")
        positions, _ = self._positions.get_rope_index(  # [3, 1, P]
            inputs["input_ids"], inputs["mm_token_type_ids"], image_grid_thw=grid
        )
        return Prompt(
            row=row,
            input_ids=inputs["input_ids"][0],
            position_ids=positions[:, 0],
            next_position=int(positions.max()) + 1,
            pixel_values=inputs.get("pixel_values"),
            image_grid_thw=grid,
            columns=columns,
            images=images if self.keep_images else None,
        )
