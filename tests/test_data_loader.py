"""Which rows a rollout has, and prompts encoded ahead of time in worker processes."""

import contextlib
import gc
import multiprocessing
import os
import pickle

import pytest
import torch
from data_sets import encoded, many_images, table
from tiny import noise_image, tiny_config, tiny_processor

from open_r1 import data as data_module
from open_r1 import data_loader
from open_r1.data import DataError, PromptEncoder, load_rows
from open_r1.data_loader import prompt_loader, row_order

ROWS = 12


@pytest.fixture
def rows(tmp_path):
    """Twelve rows with 0, 1 or 2 images each."""
    pictures = [
        [encoded(noise_image(10 * row + i, 28 + row, 40)) for i in range(row % 3)] for row in range(ROWS)
    ]
    questions = [f"How many in {row}?" for row in range(ROWS)]
    many_images(pictures, questions, list(range(ROWS))).save_to_disk(tmp_path / "rows")
    return load_rows(tmp_path / "rows")


def encoder(keep_images: bool = False) -> PromptEncoder:
    return PromptEncoder(tiny_processor(), tiny_config(), prompt_mix=0.5, keep_images=keep_images, seed=0)


def load(rows, start: int = 0, stop: int = 5, encoder=None, **share) -> list[list]:
    encoder = encoder or globals()["encoder"]()
    return list(
        prompt_loader(rows, encoder, lambda r: row_order(ROWS, 8, 7, r), start=start, stop=stop, **share)
    )


def assert_same(ours: list, theirs: list) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.row, one.next_position, one.columns) == (other.row, other.next_position, other.columns)
        for name in ("input_ids", "position_ids", "pixel_values", "image_grid_thw"):
            a, b = getattr(one, name), getattr(other, name)
            assert (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b)), name


@pytest.mark.parametrize("num_rows, prompts", [(12, 4), (12, 5), (10, 16), (1, 3)])
def test_an_epoch_has_every_row_once(num_rows, prompts):
    drawn = [row for rollout in range(12) for row in row_order(num_rows, prompts, 3, rollout)]
    epochs = [drawn[i : i + num_rows] for i in range(0, len(drawn) - num_rows + 1, num_rows)]
    assert len(epochs) >= 3
    assert all(sorted(epoch) == list(range(num_rows)) for epoch in epochs)
    assert num_rows == 1 or epochs[0] != epochs[1]


def test_the_order_is_a_function_of_seed_and_rollout():
    assert row_order(1000, 16, 0, 70) == row_order(1000, 16, 0, 70)
    assert row_order(1000, 16, 0, 70) != row_order(1000, 16, 1, 70)
    assert all(type(row) is int for row in row_order(1000, 16, 0, 70))


def test_two_processes_draw_what_one_draws(rows):
    whole = load(rows, num_workers=0)
    halves = [load(rows, num_workers=0, rank=rank, world_size=2) for rank in range(2)]
    for rollout in range(5):
        assert [prompt.row for prompt in whole[rollout]] == row_order(ROWS, 8, 7, rollout)
        assert_same(whole[rollout], halves[0][rollout] + halves[1][rollout])
        phrased = [encoder().encode(rows, row, step=rollout) for row in row_order(ROWS, 8, 7, rollout)]
        assert_same(whole[rollout], phrased)


def test_a_resumed_run_draws_what_an_uninterrupted_one_draws(rows):
    whole, rest = load(rows, num_workers=0), load(rows, start=3, num_workers=0)
    assert len(rest) == 2
    for ours, theirs in zip(rest, whole[3:], strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_give_what_the_callers_process_gives(rows, num_workers):
    alone, ahead = load(rows, num_workers=0), load(rows, num_workers=num_workers)
    for ours, theirs in zip(ahead, alone, strict=True):
        assert_same(ours, theirs)


def test_images_come_along_when_they_are_kept(rows):
    for num_workers in (0, 2):
        (prompts,) = load(rows, stop=1, encoder=encoder(keep_images=True), num_workers=num_workers)
        assert [len(prompt.images) for prompt in prompts] == [prompt.row % 3 for prompt in prompts]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_image_is_decoded_once_and_only_when_needed(rows, num_workers, tmp_path, monkeypatch):
    decode, log = data_module.decode, tmp_path / "decoded"

    def counted(file):
        with open(log, "a") as out:  # workers are other processes
            out.write(".")
        return decode(file)

    monkeypatch.setattr(data_module, "decode", counted)
    loader = prompt_loader(
        rows, encoder(), lambda r: row_order(ROWS, 6, 7, r), start=0, stop=2, num_workers=num_workers
    )
    if num_workers == 0:
        assert not log.exists()
    assert sum(len(prompts) for prompts in loader) == ROWS
    assert len(log.read_text()) == sum(row % 3 for row in range(ROWS))


def shared_files() -> int:
    """Open files of tensors that came from another process."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum("/torch_" in link for link in links)


def test_no_file_stays_open_for_each_tensor(rows):
    gc.collect()
    before = shared_files()
    kept = load(rows, num_workers=1)
    assert sum(len(prompts) for prompts in kept) == 40
    assert 0 < shared_files() - before <= len(kept)


def test_a_prompt_can_be_sent_without_its_rollout(rows):
    ((first, *_), *_) = load(rows, stop=1, num_workers=1)
    copy = pickle.loads(sent := pickle.dumps(data_loader.alone(first)))
    assert_same([copy], [first])
    held = [getattr(first, name) for name in data_loader.TENSORS]
    assert len(sent) < sum(t.numel() * t.element_size() for t in held if t is not None) + 10_000
    assert len(pickle.dumps(first)) > 4 * len(sent)


def test_training_random_numbers_are_not_drawn(rows):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    load(rows, stop=1, num_workers=1)
    assert torch.equal(torch.rand(3), expected)


def test_what_cannot_be_shared_equally_is_refused(rows):
    with pytest.raises(DataError, match="8 prompts cannot be shared equally by 3 processes"):
        load(rows, num_workers=0, world_size=3)


def test_a_signal_to_the_process_group_spares_the_workers(rows):
    loader = prompt_loader(rows, encoder(), lambda r: [r], start=0, stop=9, num_workers=2)
    next(loader)
    next(loader)
    groups = {os.getpgid(worker.pid) for worker in multiprocessing.active_children()}
    assert len(groups) == 2 and os.getpgrp() not in groups


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_bad_row_stops_the_loader_by_name(num_workers, tmp_path):
    table([encoded(noise_image(0, 40, 40)), b"broken"]).save_to_disk(tmp_path / "rows")
    rows = load_rows(tmp_path / "rows")
    loader = prompt_loader(rows, encoder(), lambda r: [r], start=0, stop=2, num_workers=num_workers)
    assert next(loader)[0].row == 0
    with pytest.raises(DataError, match="^row 1 of .*rows: an image cannot be opened: its format is unknown"):
        next(loader)


def test_too_little_shared_memory_is_said_and_not_died_of(rows, monkeypatch):
    monkeypatch.setattr(data_loader, "SHARED_MEMORY", "/")
    monkeypatch.setattr(data_loader.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(DataError, match="set --dataloader_num_workers 0"):
        load(rows, num_workers=1)
    assert len(load(rows, num_workers=0)) == 5


@pytest.fixture
def spawned():
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method("fork", force=True)


def test_workers_may_be_spawned(rows, spawned):
    assert_same(load(rows, stop=1, num_workers=1)[0], load(rows, stop=1, num_workers=0)[0])
