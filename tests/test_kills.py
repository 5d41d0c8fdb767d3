"""A save is killed, and the disk fills up, at every single change of a file: a whole model stands there."""

import hashlib
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import Qwen2VLConfig

from open_r1 import checkpoint, install
from open_r1 import submission as module
from open_r1.checkpoint import INDEX, load_policy, read_header, weight_files
from open_r1.install import holds_something, read_record, record_path
from open_r1.submission import ensure_submission, note_score, write_submission
from tests.faults import full_disk_from, kill_points, killed_at, operations
from tests.test_checkpoint import FORMS, save_form
from tests.test_submission import rounded_values, values

SCENARIOS = {
    # what stands there, what is written, whether the folder cannot be exchanged (a mount point)
    "first minute": (None, "public", False),
    "first minute, mounted": (None, "public", True),
    "ours": ("ours", "public", False),
    "ours, mounted": ("ours", "public", True),
    "ours in one file, mounted": ("ours", "library", True),
    "somebody's": ("library", "public", False),
    "somebody's, mounted": ("library", "public", True),
    "somebody's in shards, mounted": ("library in shards", "library", True),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Of every form the base (seed 0) and, in "other FORM", what somebody made of it (seed 5)."""
    root = tmp_path_factory.mktemp("models")
    for form in FORMS:
        save_form(form, root / form)
        other = root / f"other {form}"
        write_submission(root / form, other, values(5).items(), {})
        companion = other / "generation_config.json"
        companion.write_text(companion.read_text().replace("{", '{"max_new_tokens": 99,', 1))
        (other / "notes.txt").write_text("mine")
    return root


def tensors_of(folder: Path) -> str:
    """A digest of all tensors, wherever they lie."""
    digest = {}
    for file in weight_files(folder):
        header, entries = read_header(folder / file)
        content = (folder / file).read_bytes()[len(header) :]
        for name, entry in entries.items():
            start, end = entry["data_offsets"]
            assert end <= len(content), f"{file} is cut short"
            digest[name] = hashlib.sha256(content[start:end]).hexdigest()
    return hashlib.sha256(repr(sorted(digest.items())).encode()).hexdigest()


def companions_of(folder: Path) -> dict[str, bytes]:
    """Everything beside the weights, but for hidden files."""
    names = {path.name for path in folder.iterdir() if path.is_file() and path.suffix != ".safetensors"}
    return {name: (folder / name).read_bytes() for name in names if name != INDEX and name[0] != "."}


def holds_seed(folder: Path, seed: int) -> bool:
    expected = rounded_values(seed)
    loaded = load_policy(folder, "auto").named_parameters()
    return all(np.array_equal(p.detach().float().numpy(), expected[name]) for name, p in loaded)


class Folder:
    """A submission folder that is made anew for every fault."""

    def __init__(self, scenario: str, models: Path, tmp_path: Path):
        before, after, self.mounted = SCENARIOS[scenario]
        self.root, self.base, self.kept = tmp_path / "out", models / after, tmp_path / "kept"
        self.sub, self.somebodys = self.root / "submission", before not in (None, "ours")
        self.seeds, self.scores = {}, {}
        if before == "ours":
            write_submission(self.base, self.kept, values(1).items(), {"score": 1})
        elif before:
            shutil.copytree(models / f"other {before}", self.kept)
            note_score(self.kept, score=1)
        if before:
            self.old, self.old_companions = tensors_of(self.kept), companions_of(self.kept)
            self.seeds[self.old], self.scores[self.old] = 5 if self.somebodys else 1, 1
        write_submission(self.base, tmp_path / "new", values(2).items(), {})
        self.new, self.companions = tensors_of(tmp_path / "new"), companions_of(self.base)
        if before:
            self.seeds[self.new], self.scores[self.new] = 2, 2
        else:
            self.new = tensors_of(self.base)
            self.seeds[self.new] = 0
        self.loaded, self.known = set(), set()

    def prepare(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()
        if self.kept.exists():
            shutil.copytree(self.kept, self.sub, copy_function=shutil.copy2)
            shutil.copy2(record_path(self.kept), record_path(self.sub))
        if self.mounted:
            self.sub.mkdir(exist_ok=True)
            (self.sub / ".mounted").touch()

    def save(self) -> None:
        if self.kept.exists():
            write_submission(self.base, self.sub, values(2).items(), {"score": 2})
        else:
            ensure_submission(self.base, self.sub)

    def check(self) -> str:
        """A whole model stands there, old or new; which."""
        if not self.kept.exists() and not holds_something(self.sub):
            return "nothing"
        stands, companions = tensors_of(self.sub), companions_of(self.sub)
        assert stands in self.seeds
        if stands in self.scores:
            assert read_record(self.sub)["score"] == self.scores[stands]
        if stands == self.new:
            assert {name: companions[name] for name in self.companions} == self.companions
        else:
            assert companions == self.old_companions
        self.load(self.seeds[stands])
        return "new" if stands == self.new else "old"

    def load(self, seed: int) -> None:
        """As its users do; the same bytes once."""
        key = seed, tensors_of(self.sub), repr(sorted(companions_of(self.sub).items()))
        assert key in self.loaded or holds_seed(self.sub, seed)
        self.loaded.add(key)

    def start_again(self) -> None:
        """The next run leaves what is somebody's, deletes what is ours, and replaces the model.

        What it does depends on names, sizes and what stands there: the same once."""
        key = sorted((str(path), path.stat().st_size) for path in self.root.rglob("*") if path.is_file())
        if (key := (repr(key), self.check())) in self.known:
            return
        self.known.add(key)
        stood = holds_something(self.sub) and tensors_of(self.sub)
        assert ensure_submission(self.base, self.sub) is bool(stood)
        assert tensors_of(self.sub) == (stood or self.new)
        names = {path.name for path in self.root.iterdir()}
        assert names <= {"submission", "submission.record.json", "submission.previous"}
        assert {path.name for path in self.sub.iterdir() if path.name[0] == "."} <= {".mounted"}
        weights = {path.name for path in self.sub.iterdir() if path.suffix == ".safetensors"}
        assert weights == set(weight_files(self.sub))
        write_submission(self.base, self.sub, values(3).items(), {"score": 3})
        self.load(3)
        assert read_record(self.sub) == {"score": 3}
        assert companions_of(self.sub) == self.companions
        if self.somebodys:
            previous = [path for path in self.root.iterdir() if ".previous" in path.name]
            kept = [path for path in previous if tensors_of(path) == self.old]
            assert kept and (kept[0] / "notes.txt").read_text() == "mine"
            assert any(companions_of(path) == self.old_companions for path in kept)
        assert (self.sub / ".mounted").exists() == self.mounted


CONFIGS: dict[bytes, Qwen2VLConfig] = {}


def config_of(folder: Path) -> Qwen2VLConfig:
    """Made once of the same bytes: making one takes longer than all else that is read of a folder."""
    content = (folder / "config.json").read_bytes()
    if content not in CONFIGS:
        CONFIGS[content] = Qwen2VLConfig.from_pretrained(folder)
    return CONFIGS[content]


@pytest.fixture
def place(request, models, tmp_path, monkeypatch) -> Folder:
    monkeypatch.setattr(module, "is_valid_model", lambda _: None)  # it reads only, and takes long
    monkeypatch.setattr(checkpoint, "Qwen2VLConfig", SimpleNamespace(from_pretrained=config_of))
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # a kill loses nothing that was written
    folder = Folder(request.param, models, tmp_path)
    if folder.mounted:

        def refuse(one, other):
            raise OSError(16, "Device or resource busy")

        monkeypatch.setattr(install, "exchange", refuse)
    return folder


@pytest.mark.parametrize("place", SCENARIOS, indirect=True)
def test_a_kill_at_any_change_leaves_the_old_model_or_the_new(place, tmp_path):
    place.prepare()
    calls = operations(place.save, tmp_path / "calls.json")
    assert place.check() == "new"
    seen = []
    for number, middle in kill_points(calls):
        place.prepare()
        killed_at(place.save, number, middle)
        try:
            seen.append(place.check())
            place.start_again()
        except Exception as error:
            raise AssertionError(f"killed at call {number}, {calls[number]}, middle: {middle}") from error
    assert len(seen) > 40 and set(seen) == {"new", "old" if place.kept.exists() else "nothing"}
    assert seen == sorted(seen, reverse=True)  # old until one moment, new from then on
    print(f"{len(seen)} kills")


@pytest.mark.parametrize(
    "place", ["first minute, mounted", "ours", "somebody's", "somebody's in shards, mounted"], indirect=True
)
def test_a_full_disk_leaves_a_whole_model_and_says_so(place, tmp_path):
    place.prepare()
    calls = operations(place.save, tmp_path / "calls.json")
    for number in range(len(calls)):
        place.prepare()
        undo = full_disk_from(number)
        try:
            place.save()
            refused = False
        except (OSError, ValueError):  # the first minute says it in a sentence
            refused = True
        finally:
            undo()
        try:
            stands = place.check()
            assert refused or stands == "new"
            assert not {".submission.new", ".submission.swap"} & {path.name for path in place.root.iterdir()}
            place.start_again()
        except Exception as error:
            raise AssertionError(f"full from call {number}, {calls[number]}, on") from error
