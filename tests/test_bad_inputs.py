"""The corpus of bad inputs through the product's own functions: refused in one sentence, or trained on."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Image as DatasetsImage
from PIL import Image
from safetensors.torch import load_file, save_file

from open_r1.checkpoint import is_valid_model, load_policy
from open_r1.data import DataError, PromptEncoder, gold_answer, load_rows
from open_r1.data_checks import check_rows
from open_r1.images import decode
from open_r1.processor import load_processor
from open_r1.submission import ensure_submission
from tests.bad_checkpoints import CHECKPOINTS, FIRST, SECOND, point_index_outside
from tests.bad_inputs import DATA_SETS, IMAGES, PICTURE, QUESTIONS, RAMP, SOLUTIONS, TRANSPARENT, jsonl
from tests.test_grpo import lines, run
from tests.tiny import save_public_form, tiny_config, tiny_processor


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad") / "base"
    save_public_form(folder)
    return folder


def encoder(limit: int = 8192) -> PromptEncoder:
    processor = tiny_processor()
    processor.tokenizer.model_max_length = limit
    return PromptEncoder(processor, tiny_config(), prompt_mix=0.5, keep_images=False, seed=0)


def assert_refused_or_fine(said: str | None, words: str | None) -> None:
    """One sentence: no traceback, no line break; it says what is expected."""
    if words is None:
        assert said is None
    else:
        assert said is not None and words in said and "\n" not in said


# --- Rows: every image, question and solution of the corpus is a row ----------------------------------------


def row_cases() -> list[tuple[str, dict, str | None]]:
    """(name, row of JSONL, expected words)."""
    good = {"problem": "How many?", "solution": 3}
    cases = [
        (f"image: {name}", good | {"image": f"image_{i}.png" if content is not None else None}, words)
        for i, (name, (content, words)) in enumerate(IMAGES.items())
    ]
    cases += [(f"question: {name}", good | {"problem": q}, words) for name, (q, words) in QUESTIONS.items()]
    cases += [
        (f"solution: {name}", good | {"solution": s}, words)
        for name, (s, words) in SOLUTIONS.items()
        if not isinstance(s, bytes)  # which JSON does not have
    ]
    cases += [
        ("a file that is missing", good | {"image": "nowhere.png"}, "there is no file"),
        ("a folder", good | {"image": "."}, "there is no file"),
        ("a pipe", good | {"image": "/dev/zero"}, "there is no file"),
        ("an address", good | {"image": "https://example.com/a.png"}, "there is no file"),
        ("a name that is too long", good | {"image": "a" * 5000}, "cannot be opened: File name too long"),
        ("an empty path", good | {"image": ""}, "there is no file"),
        ("no bytes and no path", good | {"image": {"bytes": None, "path": None}}, "neither bytes nor a path"),
        ("a place of a list is empty", good | {"images": ["image_0.png", None]}, "image 2 has neither"),
        ("a list in a list", good | {"images": [["image_0.png"]]}, "image 1 has neither"),
        ("two images", good | {"images": ["image_0.png", "image_1.png"]}, None),
        ("no images", good | {"images": []}, None),
    ]
    return cases


ROW_CASES = row_cases()


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """(the reason check_rows gives for each row, the data set)."""
    folder = tmp_path_factory.mktemp("rows")
    for i, (content, _) in enumerate(IMAGES.values()):
        if content is not None:
            (folder / f"image_{i}.png").write_bytes(content)  # with the wrong extension, most of them
    jsonl(folder, *[row for _, row, _ in ROW_CASES])
    data = load_rows(folder / "train.jsonl")
    bad = check_rows(data, encoder().processor, full=True, num_workers=0)
    return {one.index: one.reason for one in bad}, data


@pytest.mark.parametrize("case", range(len(ROW_CASES)), ids=[name for name, _, _ in ROW_CASES])
def test_a_row_is_refused_or_encoded(rows, case):
    """check_rows and the encoder agree: what passes the one passes the other."""
    reasons, data = rows
    words = ROW_CASES[case][2]
    assert_refused_or_fine(reasons.get(case), words)
    if words == "holds '<image>'":
        return  # only training refuses it: the grader shows what stands there
    try:
        prompt, said = encoder().encode(data, case), None
        assert prompt.input_ids.numel() == prompt.position_ids.shape[1] and prompt.columns["answer"] in (0, 3)
    except DataError as error:
        said = str(error)
        assert said.startswith(f"row {case} of ")
    assert_refused_or_fine(said, words)


@pytest.mark.parametrize("solution, words", SOLUTIONS.values(), ids=SOLUTIONS)
def test_a_solution_is_a_count_or_refused(solution, words):
    try:
        answer, said = gold_answer(solution), None
        assert type(answer) is int and answer in (0, 3)
    except DataError as error:
        said = str(error)
        assert len(said) < 200
    assert_refused_or_fine(said, words)


# --- What an image becomes ----------------------------------------------------------------------------------


def pixels(name: str) -> np.ndarray:
    return np.asarray(decode(io.BytesIO(IMAGES[name][0])))


def test_opaque_images_are_those_of_the_datasets_library():
    """Turned as EXIF says, first frame, 8 bits: bytes in any form give what the grader's library gives."""
    opaque = [
        name
        for name, (content, words) in IMAGES.items()
        if content and not words and name not in ("RGBA", "WebP with alpha", "palette with transparency")
    ]
    assert len(opaque) > 15
    for name in opaque:
        theirs = DatasetsImage().decode_example({"path": None, "bytes": IMAGES[name][0]}).convert("RGB")
        assert np.array_equal(pixels(name), np.asarray(theirs)), name
    exact = ("PNG", "BMP", "TIFF", "lossless WebP", "RGB of 16 bits", "animated WebP", "animated PNG")
    for name in exact:
        assert np.array_equal(pixels(name), np.asarray(PICTURE)), name
    assert pixels("EXIF turned").shape == (64, 48, 3)


def test_what_is_transparent_becomes_white():
    seen = TRANSPARENT[..., 3] > 0
    for name in ("RGBA", "WebP with alpha"):
        assert np.array_equal(pixels(name)[seen], TRANSPARENT[..., :3][seen]), name
        assert (pixels(name)[~seen] == 255).all(), name
    image = Image.open(io.BytesIO(IMAGES["palette with transparency"][0]))
    hidden = np.asarray(image) == image.info["transparency"]
    assert hidden.any() and (pixels("palette with transparency")[hidden] == 255).all()


def test_why_16_bits_are_refused():
    """Pillow's own conversion leaves nothing of such an image."""
    assert RAMP.max() > 60_000
    assert np.asarray(Image.fromarray(RAMP).convert("RGB")).mean() > 250


# --- Data sets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make, words", DATA_SETS.values(), ids=DATA_SETS)
def test_a_data_set_is_opened_or_refused(make, words, tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    try:
        data, said = load_rows(make(folder)), None
        assert check_rows(data, tiny_processor(), full=True, num_workers=0) == []
    except DataError as error:
        said = str(error)
        assert str(folder) in said
    assert_refused_or_fine(said, words)
    assert not (folder / "ran").exists()


# --- Checkpoints ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage, words", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_a_checkpoint_loads_or_is_refused(base, damage, words, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    damage(folder)
    try:
        model, processor = load_policy(folder, torch.float32), load_processor(folder)
        PromptEncoder(processor, model.config, prompt_mix=0, keep_images=False, seed=0)
        said = None
    except ValueError as error:
        said = str(error)
    assert_refused_or_fine(said, words)
    assert_refused_or_fine(is_valid_model(folder), words)  # as a submission it is judged alike
    assert not (folder / "ran").exists()


def test_values_that_are_not_finite_are_found_in_every_tensor_and_type(base, tmp_path):
    shutil.copytree(base, tmp_path / "model")
    for file in (FIRST, SECOND):
        tensors = load_file(base / file)
        name = sorted(tensors)[0]
        tensors[name].view(-1)[-1] = float("-inf")
        save_file(tensors, tmp_path / "model" / file, metadata={"format": "pt"})
        for dtype in (torch.float32, torch.bfloat16, "auto"):
            with pytest.raises(ValueError, match="not finite"):
                load_policy(tmp_path / "model", dtype)
        assert "not finite" in is_valid_model(tmp_path / "model")
        shutil.copy(base / file, tmp_path / "model" / file)
    assert is_valid_model(tmp_path / "model") is None


def test_a_foreign_index_makes_nothing_written_outside_the_submission(base, tmp_path):
    """The submission has the base's file names: ../name would be written beside it."""
    shutil.copytree(base, tmp_path / "inner/model")
    point_index_outside(tmp_path / "inner/model")
    with pytest.raises(ValueError, match="outside its folder"):
        ensure_submission(tmp_path / "inner/model", tmp_path / "out/submission")
    assert not list((tmp_path / "out").rglob("*.safetensors"))


# --- Whole runs -----------------------------------------------------------------------------------------


def test_a_run_on_all_that_is_odd_but_right(base, tmp_path, rows):
    """Each row of the corpus that is not refused, and a few that are left out: trained on, in one run."""
    reasons, data = rows
    source = data.source.removesuffix("/train.jsonl")
    keep = [i for i in range(len(ROW_CASES)) if i not in reasons and "30,000" not in ROW_CASES[i][0]]
    bad = [i for i in reasons if "words" not in ROW_CASES[i][0]][::6]
    chosen = keep + bad
    written = [json.dumps(ROW_CASES[i][1]) for i in chosen]
    (tmp_path / "train").mkdir()
    for path in Path(source).glob("*.png"):
        shutil.copy(path, tmp_path / "train" / path.name)
    (tmp_path / "train/train.jsonl").write_text("\n".join(written))
    folder = tmp_path
    (folder / "base").symlink_to(base)
    trainer = run(
        folder, tmp_path / "out", "--skip_bad_rows", "true", "--max_steps", 1, "--num_generations", 2,
        "--gradient_accumulation_steps", len(keep), "--max_completion_length", 2, "--shuffle_dataset",
        "false", "--save_strategy", "no", "--dataloader_num_workers", 0,
    )  # fmt: skip
    assert trainer.state.global_step == 1
    listed = [json.loads(line)["row"] for line in (tmp_path / "out/bad_rows.jsonl").read_text().splitlines()]
    assert listed == list(range(len(keep), len(chosen))) and len(bad) > 8
    assert {sample["row"] for sample in lines(tmp_path / "out/rollouts.jsonl")} == set(range(len(keep)))
    (loss,) = [log["loss"] for log in lines(tmp_path / "out/logs.jsonl") if "loss" in log]
    assert np.isfinite(loss)


@pytest.mark.parametrize("name", ["NaN", "adapter only", "tokenizer is missing", "a shard cut short"])
def test_a_run_on_a_damaged_base_ends_before_it_begins(base, name, tmp_path):
    damage, words = CHECKPOINTS[name]
    shutil.copytree(base, tmp_path / "base")
    damage(tmp_path / "base")
    (tmp_path / "train").mkdir()
    jsonl(tmp_path / "train", *[{"image": "a.png", "problem": "How many?", "solution": 1}] * 4)
    with pytest.raises(ValueError) as refusal:
        run(tmp_path, tmp_path / "out", "--max_steps", 1, "--save_strategy", "no")
    assert words in str(refusal.value)
    assert not (tmp_path / "out/logs.jsonl").exists()
