"""Bad rows are found, named and never replaced; rows that share an image with validation are left out."""

import json
import os
import shutil
import time

import numpy as np
import pytest
import torch
from data_sets import QUESTIONS, encoded, many_images, table, write_form, write_jsonl
from datasets import DatasetDict
from PIL import Image as PILImage
from tiny import noise_image, tiny_processor

from open_r1 import data as data_module
from open_r1 import data_checks
from open_r1.data import DataError, load_rows
from open_r1.data_checks import (
    BackgroundDecode,
    BadRow,
    check_rows,
    drop_overlap,
    good_rows,
    refuse_same_folder,
)

GOOD = encoded(noise_image(0, 60, 60))
JPEG = encoded(noise_image(0, 60, 60), "JPEG")
TRUNCATED = JPEG[: len(JPEG) // 2]  # the header is whole

# (image, question, solution, what the reason says; None: a good row)
CASES = [
    (GOOD, "How many?", "3", None),
    (JPEG, "How many?", "<answer> 0 </answer>", None),
    (None, "How many?", "1", None),
    (GOOD, "  ", "3", "problem '  ' is not a question"),
    (GOOD, None, "3", "problem None is not a question"),
    (GOOD, "How many?", "", "solution '' is not a count"),
    (GOOD, "How many?", None, "solution None is not a count"),
    (GOOD, "How many?", "-2", "solution '-2' is not a count"),
    (GOOD, "How many?", "<answer> two </answer>", "is not a count"),
    (GOOD, "How many <|image_pad|>?", "3", "the question holds '<|image_pad|>'"),
    (GOOD, "How many?<|im_end|>", "3", "the question holds '<|im_end|>'"),
    (GOOD, "<image>How many?", "3", "the question holds '<image>'"),
    (GOOD[:20], "How many?", "3", "an image cannot be opened"),
    (b"", "How many?", "3", "an image cannot be opened: its format is unknown"),
    (b"<html>", "How many?", "3", "an image cannot be opened: its format is unknown"),
    (encoded(noise_image(0, 1, 1)), "How many?", "3", "1 x 1 pixels has a side under 28"),
    (encoded(noise_image(0, 60, 27)), "How many?", "3", "60 x 27 pixels has a side under 28"),
    (encoded(PILImage.new("1", (28, 28 * 201))), "How many?", "3", "28 x 5628 pixels is more than 200 to 1"),
    (GOOD, "The last?", "3", None),
]


@pytest.fixture
def cases(tmp_path):
    pictures, questions, solutions, _ = zip(*CASES, strict=True)
    table(list(pictures), list(questions), list(solutions)).save_to_disk(tmp_path / "cases")
    return load_rows(tmp_path / "cases")


@pytest.fixture
def truncated(tmp_path):
    """Row 1 of three cannot be decoded, and only decoding can tell."""
    table([GOOD, TRUNCATED, JPEG]).save_to_disk(tmp_path / "truncated")
    return load_rows(tmp_path / "truncated")


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_kind_of_bad_row_is_found(cases, full, num_workers, monkeypatch):
    monkeypatch.setattr(data_checks, "CHUNK", 5)
    bad = check_rows(cases, tiny_processor(), full=full, num_workers=num_workers)
    reasons = {row: case[3] for row, case in enumerate(CASES) if case[3]}
    assert [one.index for one in bad] == list(reasons)
    for one in bad:
        assert reasons[one.index] in one.reason


def test_only_the_rows_asked_for_are_checked(cases):
    assert [one.index for one in check_rows(cases, tiny_processor(), rows=[0, 18, 5, 3])] == [5, 3]


def test_training_random_numbers_are_not_drawn(cases):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    check_rows(cases, tiny_processor(), num_workers=0)
    assert torch.equal(torch.rand(3), expected)


def test_missing_files_and_empty_places_of_a_list(tmp_path):
    (tmp_path / "a.png").write_bytes(GOOD)
    images = ["a.png", "b.png", ["a.png", None], ["a.png", "a.png"], 7]
    write_jsonl(tmp_path / "a.jsonl", [{"images": image, "problem": "q", "solution": 1} for image in images])
    bad = check_rows(load_rows(tmp_path / "a.jsonl"), tiny_processor())
    assert bad == [
        BadRow(1, f"image 1: there is no file {tmp_path / 'b.png'}"),
        BadRow(2, "image 2 has neither bytes nor a path"),
        BadRow(4, "image 1 has neither bytes nor a path"),
    ]


def test_headers_are_checked_without_decoding(truncated, monkeypatch):
    monkeypatch.setattr(data_checks, "decode", lambda file: pytest.fail("decoded"))
    monkeypatch.setattr(data_module, "decode", lambda file: pytest.fail("decoded"))
    assert check_rows(truncated, tiny_processor(), num_workers=0) == []


@pytest.mark.parametrize("num_workers", [0, 1])
def test_full_decoding_finds_the_truncated_file(truncated, num_workers):
    (bad,) = check_rows(truncated, tiny_processor(), full=True, num_workers=num_workers)
    assert bad.index == 1 and "truncated" in bad.reason
    background = BackgroundDecode(truncated, tiny_processor(), num_workers=num_workers)
    assert background.result() == background.poll() == [bad]
    assert background.done
    background.close()


def test_background_decoding_reports_while_it_goes_on(tmp_path, monkeypatch):
    table([TRUNCATED] * 3, QUESTIONS[:3]).save_to_disk(tmp_path / "rows")
    gate = tmp_path / "gate"
    fault = data_checks._fault

    def waiting(*arguments):
        while arguments[-1] == 2 and not gate.exists():
            time.sleep(0.01)
        return fault(*arguments)

    monkeypatch.setattr(data_checks, "CHUNK", 1)
    monkeypatch.setattr(data_checks, "_fault", waiting)
    background = BackgroundDecode(load_rows(tmp_path / "rows"), tiny_processor())
    deadline = time.time() + 30
    while len(background.poll()) < 2 and time.time() < deadline:
        time.sleep(0.01)
    assert [one.index for one in background.poll()] == [0, 1] and not background.done
    gate.touch()
    assert [one.index for one in background.result()] == [0, 1, 2]


def test_background_decoding_that_breaks_is_not_taken_for_done(truncated, monkeypatch):
    def broken(*arguments):
        raise MemoryError("no memory")

    monkeypatch.setattr(data_checks, "_fault", broken)
    for num_workers in (0, 1):
        background = BackgroundDecode(truncated, tiny_processor(), num_workers=num_workers)
        with pytest.raises(DataError, match="(?s)decoding in the background stopped: .*no memory"):
            background.result()


def test_background_decoding_can_be_given_up(truncated, monkeypatch):
    monkeypatch.setattr(data_checks, "CHUNK", 1)
    seen = []
    monkeypatch.setattr(data_checks, "_fault", lambda *arguments: seen.append(time.sleep(0.2)))
    background = BackgroundDecode(truncated, tiny_processor(), rows=[0] * 1000, num_workers=0)
    background.close()
    assert background.done and len(seen) < 10


def test_bad_rows_stop_the_run_with_the_first_ten(cases, tmp_path):
    bad = [BadRow(row, f"reason {row}") for row in range(12)]
    with pytest.raises(DataError) as error:
        good_rows(cases, bad, skip_bad_rows=False, out=tmp_path / "out")
    lines = str(error.value).splitlines()
    assert lines[0].startswith("12 of the 19 rows of") and lines[0].endswith("cases cannot be used:")
    assert lines[1:11] == [f"  row {row}: reason {row}" for row in range(10)]
    assert lines[11] == "  and 2 more" and "--skip_bad_rows" in lines[12]
    assert not (tmp_path / "out").exists()


def test_skipped_rows_are_dropped_and_listed(cases, tmp_path, monkeypatch):
    bad = [BadRow(3, "empty"), BadRow(5, "no count")]
    assert good_rows(cases, [], skip_bad_rows=False, out=tmp_path / "out") == list(range(19))
    kept = good_rows(cases, bad, skip_bad_rows=True, out=tmp_path / "out")
    assert kept == [row for row in range(19) if row not in (3, 5)]
    lines = (tmp_path / "out" / "bad_rows.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"row": 3, "reason": "empty"},
        {"row": 5, "reason": "no count"},
    ]
    monkeypatch.setenv("RANK", "1")
    assert good_rows(cases, bad, skip_bad_rows=True, out=tmp_path / "other") == kept
    assert not (tmp_path / "other").exists()
    with pytest.raises(DataError, match="no row of .*cases can be used"):
        good_rows(cases, [BadRow(row, "") for row in range(19)], skip_bad_rows=True, out=tmp_path / "out")


# --- Overlap with validation


@pytest.mark.parametrize("form", ["saved", "parquet", "jsonl"])
def test_training_on_a_validation_folder_is_refused(form, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    source = write_form(form, tmp_path / "rows")
    os.symlink(tmp_path / "rows", tmp_path / "link")
    link = source.replace(str(tmp_path / "rows"), str(tmp_path / "link"))
    for other in (source, link):
        with pytest.raises(DataError, match="is the validation set"):
            refuse_same_folder(load_rows(source), [load_rows(other)])


def test_a_link_to_a_validation_file_is_refused(tmp_path):
    source = write_form("jsonl", tmp_path / "val")
    (tmp_path / "train").mkdir()
    os.symlink(source, tmp_path / "train" / "mine.jsonl")
    with pytest.raises(DataError, match="train is the validation set"):
        refuse_same_folder(load_rows(tmp_path / "train"), [load_rows(source)])


def test_a_copy_of_a_validation_folder_is_refused_and_another_split_is_not(tmp_path):
    table(questions=QUESTIONS[::-1]).save_to_disk(tmp_path / "train")
    table().save_to_disk(tmp_path / "val")
    shutil.copytree(tmp_path / "val", tmp_path / "copy")
    train, val, copy = (load_rows(tmp_path / name) for name in ("train", "val", "copy"))
    refuse_same_folder(train, [val, copy])
    with pytest.raises(DataError, match="copy is the validation set"):
        refuse_same_folder(copy, [train, val])
    DatasetDict(train=table(questions=QUESTIONS[::-1]), test=table()).save_to_disk(tmp_path / "both")
    refuse_same_folder(load_rows(tmp_path / "both"), [load_rows(tmp_path / "both", "test")])


def test_rows_that_share_an_image_with_validation_are_dropped(tmp_path):
    pictures = [encoded(noise_image(seed, 60, 60)) for seed in range(6)]
    rows = [[pictures[0]], [pictures[1], pictures[2]], [], [pictures[3]], [pictures[2]]]
    many_images(rows, ["How many?"] * 5, [1] * 5).save_to_disk(tmp_path / "train")
    (tmp_path / "val").mkdir()
    for name in (2, 5):
        (tmp_path / "val" / f"{name}.png").write_bytes(pictures[name])
    val = [{"image": f"{name}.png", "problem": "Another question", "solution": 9} for name in (5, 2)]
    write_jsonl(tmp_path / "val" / "val.jsonl", val)
    table(pictures[3:4]).save_to_disk(tmp_path / "ood")
    train, val, ood = (load_rows(tmp_path / name) for name in ("train", "val", "ood"))
    assert drop_overlap(train, [val]) == ([0, 2, 3], 2)
    assert drop_overlap(train, [val, ood], num_workers=0) == ([0, 2], 3)
    assert drop_overlap(train, [val, ood], rows=[2, 4, 3]) == ([2], 2)
    assert drop_overlap(train, []) == ([0, 1, 2, 3, 4], 0)
    assert drop_overlap(ood, [val]) == ([0], 0)
    with pytest.raises(DataError, match="every row of .*ood shares an image with validation"):
        drop_overlap(ood, [train])


def test_images_that_differ_at_either_end_are_different(tmp_path):
    pixels = np.asarray(noise_image(0, 80, 80))
    first, last, longer = pixels.copy(), pixels.copy(), np.concatenate([pixels, pixels[:1]])
    first[0, 0, 0] ^= 1
    last[-1, -1, 0] ^= 1
    files = [encoded(PILImage.fromarray(array), "BMP") for array in (pixels, first, last, longer)]
    assert len(files[0]) == len(files[1]) == len(files[2]) > 3 * data_checks.END
    table(files[:1]).save_to_disk(tmp_path / "val")
    table(files).save_to_disk(tmp_path / "train")
    kept = drop_overlap(load_rows(tmp_path / "train"), [load_rows(tmp_path / "val")])
    assert kept == ([1, 2, 3], 1)
