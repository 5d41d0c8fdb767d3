"""Rows -> prompts: every form of data, and prompts that are the library's own."""

import pickle

import numpy as np
import pytest
import torch
from data_sets import (
    ANSWERS,
    FORMS,
    PICTURES,
    QUESTIONS,
    SIZES,
    SOLUTIONS,
    encoded,
    many_images,
    table,
    write_form,
    write_jsonl,
)
from datasets import DatasetDict
from PIL import Image as PILImage
from tiny import (
    MAX_PIXELS,
    MIN_PIXELS,
    noise_image,
    save_public_form,
    tiny_config,
    tiny_model,
    tiny_processor,
)

from open_r1 import data as data_module
from open_r1.data import DataError, PromptEncoder, gold_answer, load_rows
from open_r1.processor import load_processor
from open_r1.protocol import EVAL_TEMPLATE, TRAIN_TEMPLATE


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def encoder(prompt_mix: float = 0.0, keep_images: bool = False, seed: int = 0) -> PromptEncoder:
    return PromptEncoder(
        tiny_processor(), tiny_config(), prompt_mix=prompt_mix, keep_images=keep_images, seed=seed
    )


# --- Rows


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_rows(form, tmp_path):
    rows = load_rows(write_form(form, tmp_path / "rows"))
    assert len(rows) == 4
    for row in range(4):
        columns = rows.columns(row)
        assert columns == {
            "problem": QUESTIONS[row],
            "solution": SOLUTIONS[row],
            "question": QUESTIONS[row],
            "answer": ANSWERS[row],
        }
        (image,) = rows.images(row)
        assert image.mode == "RGB"
        assert np.array_equal(image, PICTURES[row])


def test_a_split_is_picked_and_never_guessed(tmp_path):
    test = table(questions=["The test split?"] * 4)
    DatasetDict(train=table(), test=test).save_to_disk(tmp_path / "two")
    DatasetDict(validation=test).save_to_disk(tmp_path / "one")
    assert load_rows(tmp_path / "two", "test").columns(0)["question"] == "The test split?"
    assert load_rows(tmp_path / "one").columns(0)["question"] == "The test split?"
    with pytest.raises(DataError, match="no split 'val'; it has train, test"):
        load_rows(tmp_path / "two", "val")
    for name in ("train", "val"):
        write_jsonl(tmp_path / "lines" / f"{name}.jsonl", [{"problem": name, "solution": 1}])
    assert load_rows(tmp_path / "lines", "val").columns(0)["question"] == "val"
    with pytest.raises(DataError, match="no split 'test'; it has train, val"):
        load_rows(tmp_path / "lines", "test")
    for shard in range(2):
        write_jsonl(tmp_path / "shards" / f"part-{shard}.jsonl", [{"problem": f"q{shard}", "solution": 1}])
    assert len(load_rows(tmp_path / "shards")) == 2
    write_jsonl(tmp_path / "similar" / "set_2k_train.jsonl", [{"problem": "q", "solution": 1}])
    write_jsonl(tmp_path / "similar" / "set_2k_val.jsonl", [{"problem": "q", "solution": 1}])
    with pytest.raises(DataError, match="no split 'train'; it has set_2k_train, set_2k_val"):
        load_rows(tmp_path / "similar")


def test_other_columns_reach_the_rewards_as_they_are(tmp_path):
    table(difficulty=[0.5, 1.0, 2.0, 4.0], mask=[[1, 2]] * 4).save_to_disk(tmp_path / "saved")
    columns = load_rows(tmp_path / "saved").columns(2)
    assert (columns["difficulty"], columns["mask"]) == (2.0, [1, 2])
    assert "image" not in columns
    write_jsonl(
        tmp_path / "a.jsonl", [{"question": "q", "answer": "7"}, {"question": "r", "answer": 8, "k": "v"}]
    )
    rows = load_rows(tmp_path / "a.jsonl")
    assert rows.columns(0) == {"question": "q", "answer": 7, "solution": "7", "k": None}
    assert rows.columns(1) == {"question": "r", "answer": 8, "solution": 8, "k": "v"}


def test_a_saved_format_is_not_passed_on(tmp_path):
    data = many_images([[encoded(PICTURES[0])]], ["How many?"], [3])
    data.with_format("torch").save_to_disk(tmp_path / "rows")
    columns = load_rows(tmp_path / "rows").columns(0)
    assert columns == {"question": "How many?", "answer": 3, "solution": 3}
    assert type(columns["solution"]) is int


def test_an_image_column_besides_is_never_decoded(tmp_path):
    data = table().rename_column("image", "shown").cast(table().rename_column("image", "shown").features)
    data = data.add_column("image", [{"bytes": encoded(p), "path": None} for p in PICTURES])
    data.save_to_disk(tmp_path / "rows")
    rows = load_rows(tmp_path / "rows")
    assert "shown" not in rows.columns(0)
    assert len(rows.images(0)) == 1


@pytest.mark.parametrize(
    "solution, count",
    [
        ("<answer> 3 </answer>", 3),
        ("<think>2+2</think>\n<answer>4</answer>", 4),
        ("3", 3),
        (" 12\n", 12),
        ("007", 7),
        (3, 3),
        (0, 0),
        (3.0, 3),
    ],
)
def test_gold_answer(solution, count):
    answer = gold_answer(solution)
    assert answer == count and type(answer) is int


@pytest.mark.parametrize(
    "solution",
    [
        "",
        "three",
        "-3",
        "3.5",
        "3 or 4",
        "<answer>-3</answer>",
        "<answer></answer>",
        -3,
        2.5,
        True,
        None,
        [3],
    ],
)
def test_a_solution_that_is_no_count(solution):
    with pytest.raises(DataError, match="is not a count"):
        gold_answer(solution)


@pytest.mark.parametrize(
    "source", ["/no/such/data", "./rows", "~/rows", "a/b/c", "rows.jsonl", "a/rows.parquet"]
)
def test_a_missing_path_is_never_looked_up_on_the_hub(source, monkeypatch):
    monkeypatch.setattr(data_module, "load_dataset", lambda *a, **k: pytest.fail("looked up"))
    with pytest.raises(DataError, match=f"no data at {source}"):
        load_rows(source)


def test_a_hub_name(monkeypatch):
    asked = []
    monkeypatch.setattr(data_module, "load_dataset", lambda *a: asked.append(a) or DatasetDict(test=table()))
    assert load_rows("owner/counting", "test", "small").columns(1)["answer"] == 4
    assert asked == [("owner/counting", "small")]

    def unreachable(*args):
        raise ConnectionError("offline")

    monkeypatch.setattr(data_module, "load_dataset", unreachable)
    with pytest.raises(DataError, match="no data at owner/counting, and none came from the hub: offline"):
        load_rows("owner/counting")


def test_what_cannot_be_opened_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty is neither"):
        load_rows(tmp_path / "empty")
    table().remove_columns("solution").save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match="no column solution or answer; it has problem"):
        load_rows(tmp_path / "saved")
    (tmp_path / "a.jsonl").write_text('{"problem": "q", "solution": 1}\n\n{"problem": \n')
    with pytest.raises(DataError, match="a.jsonl, line 3 is not a JSON object"):
        load_rows(tmp_path / "a.jsonl")


def test_images_are_turned_and_made_rgb_as_the_datasets_library_does(tmp_path):
    exif = PILImage.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    turned = encoded(noise_image(0, 64, 40), "JPEG", exif=exif)
    clear = encoded(noise_image(1, 40, 40).convert("RGBA"))
    table([turned, clear]).save_to_disk(tmp_path / "rows")
    rows = load_rows(tmp_path / "rows")
    assert rows.images(0)[0].size == (40, 64)
    assert rows.images(1)[0].mode == "RGB"
    assert np.array_equal(rows.images(1)[0], noise_image(1, 40, 40))


# --- Prompts


def test_a_prompt_is_the_librarys_own_encoding(tmp_path):
    table().save_to_disk(tmp_path / "rows")
    prompt = encoder(keep_images=True).encode(load_rows(tmp_path / "rows"), 1)
    inputs = tiny_processor()(
        text="<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        "<|vision_start|><|image_pad|><|vision_end|>How many red things are there? First output the thinking "
        "process in <think> </think> and final answer (number) in <answer> </answer> tags.<|im_end|>\n"
        "<|im_start|>assistant\n",
        images=PICTURES[1],
        return_tensors="pt",
    )
    assert torch.equal(prompt.input_ids, inputs["input_ids"][0])
    assert torch.equal(prompt.pixel_values, inputs["pixel_values"])
    assert prompt.pixel_values.dtype == torch.float32
    assert prompt.image_grid_thw.tolist() == [[1, 4, 6]]
    assert prompt.columns["answer"] == 4 and prompt.row == 1
    assert [image.size for image in prompt.images] == [SIZES[1]]
    assert encoder().encode(load_rows(tmp_path / "rows"), 1).images is None


@pytest.mark.parametrize("num_images", [0, 1, 2])
def test_positions_are_those_the_model_computes_itself(num_images, tmp_path):
    pictures = [encoded(noise_image(seed, *size)) for seed, size in enumerate([(112, 60), (56, 140)])]
    many_images([pictures[:num_images]], ["How many?"], [2]).save_to_disk(tmp_path / "rows")
    prompt = encoder().encode(load_rows(tmp_path / "rows"), 0)
    assert (prompt.pixel_values is None) == (prompt.image_grid_thw is None) == (num_images == 0)
    model = tiny_model()
    next_token = torch.tensor([65])
    input_ids = torch.cat([prompt.input_ids, next_token])[None]
    position_ids = torch.cat([prompt.position_ids, torch.full((3, 1), prompt.next_position)], dim=1)[:, None]
    images = {}
    if num_images:
        types = (input_ids == tiny_processor().image_token_id).int()
        images = {"pixel_values": prompt.pixel_values, "image_grid_thw": prompt.image_grid_thw}
        images |= {"mm_token_type_ids": types}
    with torch.no_grad():
        own = model(input_ids=input_ids, **images).logits
        ours = model(input_ids=input_ids, position_ids=position_ids, **images).logits
    assert torch.equal(own, ours)
    assert prompt.input_ids.tolist().count(tiny_processor().image_token_id) == [0, 8, 18][num_images]


def test_both_phrasings_are_mixed_as_a_function_of_seed_row_and_step(tmp_path):
    many_images([[]] * 4, ["How many {things}?"] * 4, [1] * 4).save_to_disk(tmp_path / "rows")
    rows, decode = load_rows(tmp_path / "rows"), tiny_processor().decode
    texts = [decode(encoder(prompt_mix).encode(rows, 0).input_ids) for prompt_mix in (0.0, 1.0)]
    assert EVAL_TEMPLATE.format(question="How many {things}?") in texts[0]
    assert TRAIN_TEMPLATE.format(question="How many {things}?") in texts[1]
    asked = decode(encoder(1.0).encode(rows, 0, EVAL_TEMPLATE).input_ids)
    assert EVAL_TEMPLATE.format(question="How many {things}?") in asked

    def phrasings(mixed: PromptEncoder) -> list[str]:
        return [mixed.template(row, step) for row in range(100) for step in range(40)]

    chosen = phrasings(encoder(0.25))
    assert chosen == phrasings(encoder(0.25)) != phrasings(encoder(0.25, seed=1))
    assert abs(chosen.count(TRAIN_TEMPLATE) / 4000 - 0.25) < 0.03
    assert set(chosen[:40]) == {TRAIN_TEMPLATE, EVAL_TEMPLATE}  # one row, many steps


def test_what_cannot_be_encoded_names_its_row(tmp_path):
    data = table(
        [encoded(PICTURES[0]), b"not an image"], ["How many <|image_pad|>?", "How many?"], ["1", "2"]
    )
    data.save_to_disk(tmp_path / "rows")
    rows = load_rows(tmp_path / "rows")
    with pytest.raises(DataError, match="row 0 of .*rows: the question holds '<|image_pad|>'"):
        encoder().encode(rows, 0)
    with pytest.raises(DataError, match="row 1 of .*rows: an image cannot be opened: its format is unknown"):
        encoder().encode(rows, 1)


def test_rows_and_encoder_travel_by_pickle(tmp_path):
    rows = load_rows(write_form("jsonl", tmp_path / "lines"))
    first = encoder(0.5).encode(rows, 2)
    rows, copy = pickle.loads(pickle.dumps((rows, encoder(0.5))))
    second = copy.encode(rows, 2)
    assert torch.equal(first.input_ids, second.input_ids)
    assert torch.equal(first.pixel_values, second.pixel_values)


# --- The processor


def grid(processor) -> list[int]:
    inputs = processor(text="<|image_pad|>", images=noise_image(0, 200, 100), return_tensors="pt")
    return inputs["image_grid_thw"][0].tolist()


@pytest.fixture(params=["public", "saved"])
def checkpoint(request, tmp_path):
    """A folder in the public form, and one written by today's library."""
    if request.param == "public":
        save_public_form(tmp_path / "model")
    else:
        tiny_processor().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_pixel_limits(checkpoint, capsys):
    processor = load_processor(checkpoint)
    assert grid(processor) == [1, 8, 14]
    assert processor.tokenizer.padding_side == "left"
    assert load_processor(checkpoint, MIN_PIXELS, MAX_PIXELS) and capsys.readouterr().out == ""
    assert grid(load_processor(checkpoint, max_pixels=100 * 100)) == [1, 4, 10]
    assert f"at {MIN_PIXELS} to 10000 pixels" in capsys.readouterr().out
    assert grid(load_processor(checkpoint, min_pixels=400 * 200)) == [1, 16, 30]
    assert grid(load_processor(checkpoint, 56 * 56, 60 * 60)) == [1, 2, 6]
    assert grid(load_processor(checkpoint)) == [1, 8, 14]


def test_pixel_limits_that_leave_no_size(checkpoint):
    for limits in ((5000, 4000), (0, 4000), (MAX_PIXELS + 1, None)):
        with pytest.raises(DataError, match="leave no size"):
            load_processor(checkpoint, *limits)
