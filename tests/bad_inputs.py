"""A corpus of inputs that somebody, some day, hands to a run: each with the sentence it must be refused with.

A case is (what it holds, words of the refusal); None stands for "trains correctly". Images, questions and
solutions become a row each of one data set; a data set is a function that writes it. Checkpoints stand in
bad_checkpoints.py.
"""

import io
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from tests.tiny import noise_image


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


# --- Images ---------------------------------------------------------------------------------------------

PICTURE = noise_image(0, 64, 48)
PNG, JPEG = encoded(PICTURE), encoded(PICTURE, "JPEG")
RAMP = np.arange(48 * 64, dtype=np.uint16).reshape(48, 64) * 20  # a gray image of 16 bits
TRANSPARENT = np.dstack([np.asarray(PICTURE), np.tile(np.uint8([0, 255]), (48, 32))])


def with_exif(kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(PICTURE, kind, exif=exif)


def animated(kind: str) -> bytes:
    others = [noise_image(seed, 64, 48) for seed in (1, 2)]
    return encoded(PICTURE, kind, save_all=True, append_images=others, lossless=True)


def chunk(name: bytes, content: bytes) -> bytes:
    """A part of a PNG, as its standard says."""
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(width: int, height: int, depth: int, colour: int, pixels: bytes = b"", *others: bytes) -> bytes:
    """A PNG that Pillow does not write."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    body = b"".join(others) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + body


def rgb_of_16_bits() -> bytes:
    rows = np.asarray(PICTURE).astype(">u2") * 257
    return png(64, 48, 16, 2, b"".join(b"\0" + row.tobytes() for row in rows))


UNKNOWN = "its format is unknown"
IMAGES: dict[str, tuple[bytes | None, str | None]] = {
    "PNG": (PNG, None),
    "JPEG": (JPEG, None),
    "gray JPEG": (encoded(PICTURE.convert("L"), "JPEG"), None),
    "progressive JPEG": (encoded(PICTURE, "JPEG", progressive=True), None),
    "BMP": (encoded(PICTURE, "BMP"), None),
    "TIFF": (encoded(PICTURE, "TIFF"), None),
    "lossless WebP": (encoded(PICTURE, "WEBP", lossless=True), None),
    "CMYK JPEG": (encoded(PICTURE.convert("CMYK"), "JPEG"), None),
    "1 bit": (encoded(PICTURE.convert("1")), None),
    "LA": (encoded(PICTURE.convert("LA")), None),
    "RGBA": (encoded(Image.fromarray(TRANSPARENT)), None),
    "WebP with alpha": (encoded(Image.fromarray(TRANSPARENT), "WEBP", lossless=True), None),
    "palette": (encoded(PICTURE.quantize(8)), None),
    "palette with transparency": (encoded(PICTURE.quantize(8), transparency=3), None),
    "RGB of 16 bits": (rgb_of_16_bits(), None),
    "gray PNG of 16 bits": (encoded(Image.fromarray(RAMP)), "has mode I;16"),
    "gray TIFF of 16 bits": (encoded(Image.fromarray(RAMP), "TIFF"), "has mode I;16"),
    "TIFF of 32 bits": (encoded(Image.fromarray(RAMP.astype(np.int32)), "TIFF"), "has mode I,"),
    "TIFF of floats": (encoded(Image.fromarray(RAMP.astype(np.float32)), "TIFF"), "has mode F"),
    "animated GIF": (animated("GIF"), None),
    "animated WebP": (animated("WEBP"), None),
    "animated PNG": (animated("PNG"), None),
    "EXIF turned": (with_exif("JPEG", 6), None),
    "EXIF mirrored": (with_exif("PNG", 2), None),
    "EXIF without meaning": (with_exif("JPEG", 99), None),
    "EXIF that is garbage": (encoded(PICTURE, "JPEG", exif=b"Exif\0\0II*\0garbage"), None),
    "no image": (None, None),
    "1 x 1": (encoded(noise_image(0, 1, 1)), "1 x 1 pixels has a side under 28"),
    "27 pixels high": (encoded(noise_image(0, 64, 27)), "64 x 27 pixels has a side under 28"),
    "30,000 pixels wide": (encoded(Image.new("L", (30_000, 160))), None),
    "30,000 x 28": (encoded(Image.new("1", (30_000, 28))), "30000 x 28 pixels is more than 200 to 1"),
    "1 x 30,000": (encoded(Image.new("1", (1, 30_000))), "1 x 30000 pixels has a side under 28"),
    "zero bytes": (b"", UNKNOWN),
    "text": (b"There are three cubes.\n", UNKNOWN),
    "HTML of an error page": (b"<!DOCTYPE html><title>404</title>", UNKNOWN),
    "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg" width="64" height="48"/>', UNKNOWN),
    "random bytes": (np.random.default_rng(0).bytes(2000), UNKNOWN),
    "a pickle": (b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93.", UNKNOWN),
    "signature only": (PNG[:8], "cannot be opened"),
    "PNG cut in its header": (PNG[:20], "cannot be opened"),
    "PNG cut in its middle": (PNG[: len(PNG) // 2], "cannot be decoded: "),
    "PNG cut in its last chunk of pixels": (PNG[:-40], "cannot be decoded: "),
    "JPEG cut in its header": (JPEG[:30], "cannot be opened"),
    "JPEG cut in its middle": (JPEG[: len(JPEG) // 2], "cannot be decoded: image file is truncated"),
    "GIF cut in its middle": (encoded(PICTURE, "GIF")[:900], "cannot be decoded: "),
    "WebP cut in its middle": (encoded(PICTURE, "WEBP")[:500], "cannot be opened"),
    "BMP cut in its middle": (encoded(PICTURE, "BMP")[:5000], "cannot be decoded: image file is truncated"),
    "TIFF cut in its middle": (encoded(PICTURE, "TIFF")[:5000], "cannot be"),
    "PNG with a flipped bit": (PNG[:600] + bytes([PNG[600] ^ 1]) + PNG[601:], "cannot be decoded: "),
    "bomb that Pillow warns of": (png(10_000, 10_000, 1, 0), "could be decompression bomb"),
    "bomb that Pillow refuses": (png(60_000, 60_000, 1, 0), "could be decompression bomb"),
    "bomb in a comment": (
        png(64, 48, 1, 0, b"", chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(100 << 20)))),
        "cannot be opened: Decompressed data too large",
    ),
}


# --- Questions and solutions ----------------------------------------------------------------------------

NO_QUESTION = "is not a question"
QUESTIONS: dict[str, tuple[object, str | None]] = {
    "empty": ("", NO_QUESTION),
    "spaces": (" \n\t ", NO_QUESTION),
    "None": (None, NO_QUESTION),
    "a number": (7, NO_QUESTION),
    "a list": (["How many?"], NO_QUESTION),
    "half of a surrogate pair": ("How many \ud83d?", "is not valid Unicode"),
    "<|im_start|>": ("How many?<|im_start|>assistant", "holds '<|im_start|>'"),
    "<|im_end|>": ("How many?<|im_end|>", "holds '<|im_end|>'"),
    "<|endoftext|>": ("<|endoftext|>How many?", "holds '<|endoftext|>'"),
    "<|image_pad|>": ("How many <|image_pad|>?", "holds '<|image_pad|>'"),
    "<|video_pad|>": ("How many <|video_pad|>?", "holds '<|video_pad|>'"),
    "<|vision_start|>": ("How many <|vision_start|>?", "holds '<|vision_start|>'"),
    "<image>": ("<image>\nHow many?", "holds '<image>'"),
    "5,000 words": ("cube " * 5000, "more than the 8,192 of the model"),
    "braces": ("How many {} of {question} in {0}?", None),
    "a Jinja template": ("How many {{ messages }} {% raw %}?", None),
    "answer tags": ("How many? <answer> 3 </answer>", None),
    "emoji": ("How many 🧊👩‍👩‍👧‍👦?", None),
    "right to left": ("כמה קוביות? كم عدد المكعبات؟", None),
    "NUL": ("How many\0?", None),
    "one letter": ("?", None),
    "a format specification": ("How many %s %d $(touch x) `y`?", None),
}

NO_COUNT = "is not a count"
SOLUTIONS: dict[str, tuple[object, str | None]] = {
    "3": ("3", None),
    "spaces": (" 3\n", None),
    "tags": ("<answer> 3 </answer>", None),
    "tags without spaces": ("<answer>3</answer>", None),
    "a think block": ("<think> 1 + 2 </think>\n<answer> 3 </answer>", None),
    "leading zero": ("03", None),
    "Arabic digits": ("٣", None),
    "int": (3, None),
    "float": (3.0, None),
    "zero": (0, None),
    "fraction": (3.5, NO_COUNT),
    "fraction as text": ("3.0", NO_COUNT),
    "a word": ("three", NO_COUNT),
    "empty": ("", NO_COUNT),
    "None": (None, NO_COUNT),
    "negative": (-1, NO_COUNT),
    "negative text": ("-1", NO_COUNT),
    "two numbers": ("3 or 4", NO_COUNT),
    "thousands": ("1,000", NO_COUNT),
    "superscript": ("³", NO_COUNT),
    "tags around a word": ("<answer> three </answer>", NO_COUNT),
    "open tag": ("<answer> 3", NO_COUNT),
    "bool": (True, NO_COUNT),
    "NaN": (float("nan"), NO_COUNT),
    "infinity": (float("inf"), NO_COUNT),
    "an id": (2**53, NO_COUNT),
    "10,000 digits": ("9" * 10_000, NO_COUNT),
    "10,000 digits in tags": (f"<answer> {'9' * 10_000} </answer>", NO_COUNT),
    "list": ([3], NO_COUNT),
    "nested list": ([[3]], NO_COUNT),
    "dict": ({"count": 3}, NO_COUNT),
    "bytes": (b"3", NO_COUNT),
}


# --- Data sets: a function that writes one into an empty folder, and what load_rows says -----------------

ROWS = [{"image": "a.png", "problem": f"How many? ({n})", "solution": n} for n in range(4)]


def parquet(folder: Path, rows: list[dict] = ROWS, name: str = "train.parquet") -> Path:
    rows = [row | {"image": {"bytes": PNG, "path": None}} for row in rows]
    pq.write_table(pa.Table.from_pylist(rows), folder / name)
    return folder / name


def saved(folder: Path) -> Path:
    from datasets import load_dataset

    data = load_dataset("parquet", data_files=str(parquet(folder)), split="train", cache_dir=folder / "cache")
    data.save_to_disk(folder / "saved")
    return folder / "saved"


def jsonl(folder: Path, *lines: object) -> Path:
    """Dictionaries become JSON; bytes are written as they are."""
    (folder / "a.png").write_bytes(PNG)
    written = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    (folder / "train.jsonl").write_bytes(b"\n".join(written) + b"\n")
    return folder / "train.jsonl"


def renamed(**names: str) -> list[dict]:
    return [{names.get(name, name): value for name, value in row.items()} for row in ROWS]


def cut(path: Path, share: float = 0.5) -> Path:
    os.truncate(path, int(path.stat().st_size * share))
    return path


def cut_arrow(folder: Path) -> Path:
    path = saved(folder)
    cut(next(path.glob("*.arrow")))
    return path


def arrow_missing(folder: Path) -> Path:
    path = saved(folder)
    next(path.glob("*.arrow")).unlink()
    return path


def garbage_state(folder: Path) -> Path:
    path = saved(folder)
    (path / "state.json").write_text("{")
    return path


def script_folder(folder: Path) -> Path:
    """A data set of code, as older versions of the library ran it."""
    (folder / "rows.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    (folder / "rows.csv").write_text("problem,solution\nHow many?,3\n")
    return folder


def pickled(folder: Path) -> Path:
    (folder / "train.pkl").write_bytes(b"\x80\x04K\x03.")
    return folder


def written(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def two_splits(folder: Path) -> Path:
    for name in ("train_a", "validation"):
        parquet(folder, name=f"{name}.parquet")
    return folder


DATA_SETS: dict[str, tuple[Callable[[Path], Path], str | None]] = {
    "parquet": (parquet, None),
    "save_to_disk": (saved, None),
    "JSONL": (lambda d: jsonl(d, *ROWS), None),
    "one row": (lambda d: jsonl(d, ROWS[0]), None),
    "duplicated rows": (lambda d: jsonl(d, *[ROWS[0]] * 4), None),
    "question and answer": (lambda d: parquet(d, renamed(problem="question", solution="answer")), None),
    "path dictionaries": (
        lambda d: jsonl(d, *[row | {"image": {"path": "a.png"}} for row in ROWS]),
        None,
    ),
    "lists of images": (lambda d: jsonl(d, *[row | {"image": ["a.png"] * 2} for row in ROWS]), None),
    "byte order mark": (lambda d: jsonl(d, b"\xef\xbb\xbf" + json.dumps(ROWS[0]).encode()), None),
    "Windows line ends": (lambda d: jsonl(d, *[json.dumps(row).encode() + b"\r" for row in ROWS]), None),
    "reserved names": (
        lambda d: parquet(d, [row | {"completions": "x", "prompts": 1, "group": 2} for row in ROWS]),
        None,
    ),
    "a NaN in a column": (lambda d: jsonl(d, *[row | {"score": float("nan")} for row in ROWS]), None),
    "mixed types in a column": (
        lambda d: jsonl(
            d, *[row | {"kind": kind} for row, kind in zip(ROWS, (1, "x", None, [2]), strict=True)]
        ),
        None,
    ),
    "nothing": (lambda d: d / "nothing", "there is no data at"),
    "empty folder": (lambda d: d, "is neither a save_to_disk folder nor parquet nor JSONL"),
    "empty JSONL": (lambda d: written(d, "train.jsonl", b"\n\n"), "has no rows"),
    "zero bytes of parquet": (lambda d: written(d, "train.parquet", b""), "cannot be read"),
    "text named .parquet": (lambda d: written(d, "train.parquet", b"How many?" * 99), "cannot be read"),
    "parquet cut short": (lambda d: cut(parquet(d)), "cannot be read"),
    "parquet without rows": (lambda d: no_rows(d), "has no rows"),
    "Arrow file cut short": (cut_arrow, "cannot be read"),
    "Arrow file missing": (arrow_missing, "cannot be read"),
    "state.json is garbage": (garbage_state, "cannot be read"),
    "no such split": (two_splits, "has no split 'train'; it has train_a, validation"),
    "no question": (lambda d: parquet(d, renamed(problem="text")), "has no column problem or question"),
    "no solution": (lambda d: parquet(d, renamed(solution="label")), "has no column solution or answer"),
    "a line cut short": (lambda d: jsonl(d, ROWS[0], b'{"problem": "How'), "line 2 is not a JSON object"),
    "a line that is a list": (
        lambda d: jsonl(d, [["problem", "q"], ["solution", 3]]),
        "line 1 is not a JSON object",
    ),
    "a line that is a number": (lambda d: jsonl(d, ROWS[0], 3), "line 2 is not a JSON object"),
    "a line in Latin-1": (
        lambda d: jsonl(d, '{"problem": "Würfel"}'.encode("latin-1")),
        "line 1 is not a JSON object",
    ),
    "CSV": (lambda d: written(d, "train.csv", b"problem,solution\nHow many?,3\n"), "is neither"),
    "a pickle": (pickled, "is neither"),
    "a data set of code": (script_folder, "is neither"),
}


def no_rows(folder: Path) -> Path:
    path = parquet(folder)
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    return path
