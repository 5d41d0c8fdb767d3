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
from typing import Any, BinaryIO, NoReturn

import PIL.Image
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.features.features import require_decoding
from pyarrow import parquet
from torch import Tensor
from transformers import Qwen2VLConfig, Qwen2VLModel, Qwen2VLProcessor

from open_r1.augment import augmented
from open_r1.images import DataError, check_size, decode, encoded_images, first_line, open_images
from open_r1.network import hub_lookup
from open_r1.processor import refuse_long_prompt, refuse_misfit, refuse_special_tokens, smallest_side
from open_r1.protocol import EVAL_TEMPLATE, TRAIN_TEMPLATE, conversation, extract_answer

# Where a row has both columns, the first counts.
IMAGE_COLUMNS = ("image", "images")
QUESTION_COLUMNS = ("problem", "question")
SOLUTION_COLUMNS = ("solution", "answer")
MAX_COUNT = 10**6  # what is larger is an id or a mistake, not a count


# --- Rows


def gold_answer(solution: Any) -> int:
    """The count in a solution: `<answer> 3 </answer>`, "3" or 3. Raises DataError for anything else."""
    try:
        count = _count(solution)
    except ValueError:  # more digits than int() reads
        count = None
    if count is None or not 0 <= count <= MAX_COUNT:
        raise DataError(f"solution {_shown(solution)} is not a count, as '<answer> 3 </answer>', '3' or 3 is")
    return count


def _count(solution: Any) -> int | None:
    if isinstance(solution, str):
        digits = re.fullmatch(r"\s*(\d+)\s*", solution)
        return int(digits[1]) if digits else extract_answer(solution)
    if isinstance(solution, float) and solution.is_integer():
        return int(solution)
    return solution if isinstance(solution, int) and not isinstance(solution, bool) else None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


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
            raise DataError(f"{self.question_column} {_shown(question)} is not a question")
        if any("\ud800" <= c <= "\udfff" for c in question):  # half of a pair, which JSON lets pass
            raise DataError(f"{self.question_column} {_shown(question)} is not valid Unicode")
        return columns | {"question": question, "solution": solution, "answer": gold_answer(solution)}

    def column(self, name: str, rows: Sequence[int]) -> list:
        """A column's values in these rows, as they are; much faster than row by row."""
        texts = self._texts
        values = [row[name] for row in texts] if isinstance(texts, list) else texts[name][:]
        return [values[row] for row in rows]

    def open_images(self, row: int) -> Iterator[BinaryIO]:
        """The row's encoded images, each as an open file of which nothing is read yet."""
        return open_images([] if self._images is None else encoded_images(self._images[row]), self.folder)

    def images(self, row: int) -> list[PIL.Image.Image]:
        """The row's images, decoded, in RGB. Raises DataError (which does not name the row)."""
        return [decode(file) for file in self.open_images(row)]


def _first_of(names: Sequence[str], columns: Sequence[str], source: str) -> str:
    for name in names:
        if name in columns:
            return name
    raise DataError(f"{source} has no column {' or '.join(names)}; it has {', '.join(columns)}")


# --- Opening a data set


def load_rows(source: str | Path, split: str = "train", config: str | None = None) -> CountingData:
    """Open a save_to_disk folder, parquet or JSONL (a folder or a file), or else a data set of the hub.

    `split` picks among several splits; a source with only one gives that one. Image paths in a JSONL file
    are relative to it. No code of a data set is ever run. Raises DataError when there is no such data, form,
    split or column, for damaged files and when there are no rows.
    """
    try:
        data = _open(str(source), split, config)
    except DataError:
        raise
    except Exception as error:  # Arrow and datasets raise their own for files that are damaged or missing
        reason = first_line(error)
        raise DataError(f"{source} cannot be read ({reason}): copy it again, or set another") from error
    return data if len(data) else _refuse_no_rows(source)


def _open(source: str, split: str, config: str | None) -> CountingData:
    path = Path(source).expanduser()
    if not os.path.exists(path):  # path.exists raises for a name that is too long
        return _from_arrow(source, _from_hub(source, config), split, folder=Path())
    path = path.resolve()
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _from_arrow(source, load_from_disk(path), split, folder=path)
    if files := _files_of(path, ".parquet", split):
        files = [file for file in files if parquet.read_metadata(file).num_rows] or _refuse_no_rows(source)
        data = load_dataset("parquet", data_files=[str(file) for file in files])
        return _from_arrow(source, data, split, folder=files[0].parent)
    if files := _files_of(path, ".jsonl", split):
        return _from_jsonl(source, files)
    raise DataError(f"{source} is neither a save_to_disk folder nor parquet nor JSONL")


def _refuse_no_rows(source: str) -> NoReturn:
    raise DataError(f"{source} has no rows: set a data set that has some")


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
        with hub_lookup():
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
        for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except ValueError as error:
                raise DataError(f"{file}, line {number} is not a JSON object: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{file}, line {number} is not a JSON object: it is {_shown(row)}")
            value = next((row.pop(name) for name in IMAGE_COLUMNS if name in row), None)
            values = value if isinstance(value, list) else [] if value is None else [value]
            images.append([_path_of(value, file.parent) for value in values])
            rows.append(row)
    if not rows:
        _refuse_no_rows(source)
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


def _path_of(value: Any, folder: Path) -> str | None:
    """The path in an image of a JSONL row, which is one or {"path": …}."""
    path = value.get("path") if isinstance(value, dict) else value
    return str(folder / path) if isinstance(path, str) else None


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
    # [image tokens, H] of pixel_values, once a frozen tower has seen them: who changes the pixels drops them.
    image_features: Tensor | None = None


class _Positions:
    """The library's own M-RoPE positions, without a model: they depend on the configuration alone."""

    get_rope_index = Qwen2VLModel.get_rope_index
    get_vision_position_ids = Qwen2VLModel.get_vision_position_ids

    def __init__(self, config: Qwen2VLConfig):
        self.config = config


class PromptEncoder:
    """Encodes rows; picklable, so that worker processes can.

    A share `prompt_mix` of the prompts has R1-V's phrasing, the others have the grader's. With `augment`
    images are changed as augment.py says, by (seed, row, step) too.
    """

    def __init__(
        self,
        processor: Qwen2VLProcessor,
        config: Qwen2VLConfig,
        *,
        prompt_mix: float,
        keep_images: bool,
        seed: int,
        augment: bool = False,
    ):
        refuse_misfit(processor, config)
        self.processor, self._positions = processor, _Positions(config)
        self.prompt_mix, self.keep_images, self.seed = prompt_mix, keep_images, seed
        self.augment = augment

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
            for image in images:
                check_size(image.size, smallest_side(self.processor))
            refuse_long_prompt(columns["question"], [image.size for image in images], self.processor)
        except DataError as error:
            raise DataError(f"row {row} of {data.source}: {error}") from error
        if self.augment:
            rng = random.Random(f"{self.seed} {row} {step} augment")
            images = [augmented(image, rng) for image in images]
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
