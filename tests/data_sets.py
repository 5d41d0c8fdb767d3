"""Small data sets for the tests of the data, in every form that load_rows reads."""

import io
import json

from datasets import Dataset, DatasetDict, Features, Image, List, Value
from PIL import Image as PILImage
from tiny import noise_image

QUESTIONS = ["How many cubes?", "How many red things are there?", "How many cats {or dogs}?", "And spheres?"]
SOLUTIONS = ["<answer> 3 </answer>", "<answer>4</answer>", "<answer> 0 </answer>", "<answer> 12 </answer>"]
ANSWERS = [3, 4, 0, 12]
SIZES = [(60, 40), (84, 56), (40, 90), (64, 64)]
PICTURES = [noise_image(seed, *size) for seed, size in enumerate(SIZES)]


def encoded(image: PILImage.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def image_column(pictures: list[bytes | None]) -> list[dict | None]:
    return [None if picture is None else {"bytes": picture, "path": None} for picture in pictures]


def table(
    pictures: list[bytes | None] | None = None,
    questions: list | None = None,
    solutions: list | None = None,
    **columns: list,
) -> Dataset:
    """A data set of `image`, `problem`, `solution` and the other columns; by default the four rows above."""
    pictures = [encoded(picture) for picture in PICTURES] if pictures is None else pictures
    content = {
        "image": image_column(pictures),
        "problem": QUESTIONS[: len(pictures)] if questions is None else questions,
        "solution": SOLUTIONS[: len(pictures)] if solutions is None else solutions,
        **columns,
    }
    data = Dataset.from_dict({name: content[name] for name in content if name != "image"})
    features = Features(image=Image(), **data.features)
    return Dataset.from_dict(content, features=features)


def many_images(rows: list[list[bytes]], questions: list[str], answers: list[int]) -> Dataset:
    """A data set of `images`, `question` and `answer`."""
    features = Features(images=List(Image()), question=Value("string"), answer=Value("int64"))
    images = [image_column(row) for row in rows]
    return Dataset.from_dict({"images": images, "question": questions, "answer": answers}, features=features)


def write_jsonl(file, rows: list[dict]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_form(form: str, folder) -> str:
    """Write the four rows above in one of FORMS; returns the path to load."""
    folder.mkdir()
    data = table()
    other = table(questions=["Not this split."] * 4)
    plain = data.cast_column("image", Image(decode=False)).to_pandas()  # image is a dict of bytes and path
    match form:
        case "saved":
            data.save_to_disk(folder)
        case "saved splits":
            DatasetDict(train=data, test=other).save_to_disk(folder)
        case "saved selection":
            picked = table(
                *[[*reversed(column)] for column in ([encoded(p) for p in PICTURES], QUESTIONS, SOLUTIONS)]
            )
            picked.select([3, 2, 1, 0]).save_to_disk(folder)
        case "parquet":
            data.to_parquet(folder / "rows.parquet")
        case "parquet file":
            data.to_parquet(folder / "rows.parquet")
            return str(folder / "rows.parquet")
        case "parquet data":
            data.to_parquet(folder / "data" / "train-00000-of-00001.parquet")
            other.to_parquet(folder / "data" / "test-00000-of-00001.parquet")
        case "parquet train":
            data.to_parquet(folder / "train" / "0.parquet")
            other.to_parquet(folder / "test" / "0.parquet")
        case "parquet without types":
            plain.to_parquet(folder / "rows.parquet")
        case "parquet of paths" | "jsonl" | "jsonl folder":
            (folder / "pictures").mkdir()
            paths = [f"pictures/{row}.png" for row in range(4)]
            for path, picture in zip(paths, PICTURES, strict=True):
                (folder / path).write_bytes(encoded(picture))
            plain["image"] = paths
            if form == "parquet of paths":
                plain.to_parquet(folder / "rows.parquet")
            else:
                write_jsonl(folder / "train.jsonl", plain.to_dict("records"))
                write_jsonl(folder / "val.jsonl", [])
            return str(folder / "train.jsonl") if form == "jsonl" else str(folder)
    return str(folder)


FORMS = [
    "saved",
    "saved splits",
    "saved selection",
    "parquet",
    "parquet file",
    "parquet data",
    "parquet train",
    "parquet without types",
    "parquet of paths",
    "jsonl",
    "jsonl folder",
]
