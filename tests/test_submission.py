import functools
import os
import resource
import shutil
import signal
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from open_r1 import install
from open_r1.checkpoint import is_valid_model, load_policy
from open_r1.install import read_record, record_path
from open_r1.submission import ensure_submission, write_submission
from tests.test_checkpoint import FORMS, put_nan, record_fsync, run_python, save_form, truncate_shard
from tests.tiny import save_public_form, tiny_config, tiny_model, tiny_processor

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def forms(tmp_path_factory) -> dict[str, Path]:
    folders = {form: tmp_path_factory.mktemp("base") / form.replace(" ", "_") for form in FORMS}
    for form, folder in folders.items():
        save_form(form, folder)
    return folders


@pytest.fixture(scope="module")
def base(forms) -> Path:
    return forms["public"]


@pytest.fixture
def sub(tmp_path) -> Path:
    return tmp_path / "out" / "submission"


@pytest.fixture
def no_exchange(monkeypatch):
    """As on a mount point, and with file systems that lack the call."""

    def refuse(one, other):
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(install, "exchange", refuse)


@functools.cache
def model_values(seed: int) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in tiny_model(seed).named_parameters()}


def values(seed: int) -> dict[str, torch.Tensor]:
    """The parameters of tiny_model(seed), to write and to change."""
    return {name: tensor.clone() for name, tensor in model_values(seed).items()}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def round_to_bfloat16(array: np.ndarray) -> np.ndarray:
    """float32 to the nearest bfloat16, ties to even, in integers and back."""
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


@functools.cache
def rounded_values(seed: int) -> dict[str, np.ndarray]:
    return {name: round_to_bfloat16(tensor.numpy()) for name, tensor in model_values(seed).items()}


def seed_of(folder: Path) -> int | None:
    """The seed whose values the model in `folder` holds, in all its parameters."""
    parameters = {n: p.detach().numpy() for n, p in load_policy(folder, torch.float32).named_parameters()}
    for seed in (1, 2, 3, 5):
        if all(np.array_equal(array, rounded_values(seed)[name]) for name, array in parameters.items()):
            return seed
    return None


def public_name(name: str) -> str:
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")


# The contract


@pytest.mark.parametrize("form", FORMS)
def test_only_the_values_of_the_base_change(forms, form, sub):
    base = forms[form]
    assert ensure_submission(base, sub) is False
    assert contents(sub) == contents(base)
    write_submission(base, sub, values(1).items(), {"score": 0.5, "step": 20})
    old, new = contents(base), contents(sub)
    shards = {name for name in old if name.endswith(".safetensors")}
    assert len(shards) == {"public": 2, "library": 1, "library in shards": 6}[form]
    assert old.keys() == new.keys()
    assert {name for name in old if old[name] != new[name]} == shards
    expected, seen = values(1), set()
    for shard in shards:
        start = 8 + int.from_bytes(old[shard][:8], "little")
        assert old[shard][:start] == new[shard][:start] and len(old[shard]) == len(new[shard])
        with safe_open(sub / shard, "np") as header, safe_open(sub / shard, "pt") as file:
            assert list(header.keys()) == list(file.keys())
            for name in file.keys():
                seen.add(name)
                parameter = next(key for key in expected if public_name(key) == name)
                assert file.get_tensor(name).dtype == torch.bfloat16
                rounded = round_to_bfloat16(expected[parameter].numpy())
                assert np.array_equal(file.get_tensor(name).float().numpy(), rounded)
    assert seen == {public_name(name) for name in expected}
    assert is_valid_model(sub) is None and seed_of(sub) == 1
    assert read_record(sub) == {"score": 0.5, "step": 20}
    assert {path.name for path in sub.parent.iterdir()} == {"submission", "submission.record.json"}


def test_values_are_rounded_once_and_to_nearest(base, sub):
    new = values(0)
    half = 2**-8  # of the last place of a bfloat16 at 1: ties go to even, one float32 step above goes up
    new["model.language_model.norm.weight"][:4] = torch.tensor(
        [1 + half, 1 + 3 * half, 1 + half + 2**-23, -1 - half - 2**-23]
    )
    write_submission(base, sub, new.items(), {})
    got = load_policy(sub, torch.float32).model.language_model.norm.weight[:4]
    assert got.tolist() == [1, 1 + 4 * half, 1 + 2 * half, -1 - 2 * half]


@pytest.mark.parametrize("in_file, given", [(False, True), (True, False), (True, True)])
def test_module_names_and_a_tied_head(forms, in_file, given, sub, tmp_path):
    base = Path(shutil.copytree(forms["library"], tmp_path / "base"))
    tensors = {name: tensor.bfloat16() for name, tensor in values(0).items()}
    if in_file:
        tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].clone()
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    new = values(1)
    if given:  # as a state dict has it
        new["lm_head.weight"] = new["model.language_model.embed_tokens.weight"]
    write_submission(base, sub, new.items(), {})
    assert is_valid_model(sub) is None and seed_of(sub) == 1
    got = load_file(sub / "model.safetensors")
    assert got.keys() == tensors.keys()
    if in_file:
        assert torch.equal(got["lm_head.weight"], got["model.language_model.embed_tokens.weight"])


def test_weights_in_other_formats_stay_behind(base, sub, tmp_path):
    """They would go on holding the base's values; and downloads leave folders behind."""
    other = Path(shutil.copytree(base, tmp_path / "base"))
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json", "extra.safetensors", "optimizer.pt"):
        (other / name).write_bytes(b"old")
    (other / ".cache").mkdir()
    (other / "LICENSE").write_text("free")
    (other / "tokenizer.json").rename(tmp_path / "blob")
    (other / "tokenizer.json").symlink_to(tmp_path / "blob")  # as in the hub's cache
    ensure_submission(other, sub)
    assert contents(sub) == contents(base) | {"LICENSE": b"free"}
    assert not (sub / "tokenizer.json").is_symlink()


NORM = "model.language_model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda v: v[NORM].__setitem__(5, torch.nan), f"{NORM} has values that are not finite"),
        (lambda v: v[NORM].__setitem__(5, 3.4e38), "not finite as torch.bfloat16"),  # it is in float32
        (lambda v: v.pop(NORM), f"1 parameters of .* got no values, first {NORM}"),
        (lambda v: v.update({"model.extra": torch.zeros(2)}), "model.extra is no parameter of"),
        (lambda v: v.update({NORM: torch.ones(63)}), r"\[63\], not torch.float32 \[64\]"),
        (lambda v: v.update({NORM: torch.ones(64).bfloat16()}), "came as torch.bfloat16"),
    ],
)
def test_wrong_values_are_refused_and_the_old_model_stays(base, sub, change, words):
    write_submission(base, sub, values(1).items(), {"score": 0.1})
    before, wrong = contents(sub), values(2)
    change(wrong)
    stream = iter(wrong.items())
    with pytest.raises(ValueError, match=words):
        write_submission(base, sub, stream, {"score": 0.2})
    assert next(stream, "at its end") == "at its end"  # the other ranks gather along
    assert contents(sub) == before and read_record(sub) == {"score": 0.1}
    assert {path.name for path in sub.parent.iterdir()} == {"submission", "submission.record.json"}


def test_a_parameter_that_comes_twice_is_refused(base, sub):
    pairs = list(values(1).items())
    with pytest.raises(ValueError, match="came twice"):
        write_submission(base, sub, [*pairs, pairs[0]], {})
    assert not sub.exists()


def test_a_model_that_does_not_load_is_not_installed(base, sub, tmp_path):
    write_submission(base, sub, values(1).items(), {"score": 0.1})
    other = Path(shutil.copytree(base, tmp_path / "base"))
    (other / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="does not load, and .* stays as it was"):
        write_submission(other, sub, values(2).items(), {"score": 0.2})
    assert seed_of(sub) == 1 and read_record(sub) == {"score": 0.1}


def test_tensors_are_streamed(base, sub):
    """Beside the one being written, the one that the loop still names: never a second model in memory."""
    alive, most = [], 0

    def stream():
        nonlocal most
        for name, parameter in values(1).items():
            tensor = parameter.clone()
            alive.append(weakref.ref(tensor))
            most = max(most, sum(reference() is not None for reference in alive))
            yield name, tensor

    write_submission(base, sub, stream(), {})
    assert most <= 2


# The first minute


def test_a_valid_model_that_stands_there_is_kept(base, sub):
    ensure_submission(base, sub)
    assert read_record(sub) == {"recipe": "base", "step": 0}
    write_submission(base, sub, values(1).items(), {"score": 0.7})
    before = contents(sub)
    assert ensure_submission(base, sub) is True
    assert contents(sub) == before and read_record(sub) == {"score": 0.7}


def junk(sub: Path, base: Path) -> None:
    sub.mkdir(parents=True)
    (sub / "thesis.txt").write_text("mine")


def broken_model(sub: Path, base: Path) -> None:
    shutil.copytree(base, sub)
    truncate_shard(sub)


def model_with_nan(sub: Path, base: Path) -> None:
    shutil.copytree(base, sub)
    put_nan(sub)


def larger_model(sub: Path, base: Path) -> None:
    config = tiny_config()
    config.text_config.num_hidden_layers = 3
    config.text_config.layer_types.append("full_attention")
    type(tiny_model())(config).save_pretrained(sub)
    tiny_processor().save_pretrained(sub)


def a_file(sub: Path, base: Path) -> None:
    sub.parent.mkdir(parents=True)
    sub.write_text("mine")


@pytest.mark.parametrize(
    "stands, words",
    [
        (junk, "no readable config.json"),
        (broken_model, "has 5,000 bytes and"),
        (model_with_nan, "not finite"),
        (larger_model, "tensors are not those of"),
        (a_file, "is not a folder"),
    ],
)
def test_anything_else_is_refused_and_left_alone(base, sub, stands, words):
    stands(sub, base)
    before = sub.read_bytes() if sub.is_file() else contents(sub)
    expected = f"SUBMISSION {sub} .*{words}.*set it to a new or empty folder"
    with pytest.raises(ValueError, match=expected) as refusal:
        ensure_submission(base, sub)
    assert "\n" not in str(refusal.value)
    assert before == (sub.read_bytes() if sub.is_file() else contents(sub))


def test_the_base_itself_is_never_the_submission(base, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(base)
    for folder in (base, base / "submission", base.parent, link):
        with pytest.raises(ValueError, match="would overwrite the base model"):
            ensure_submission(base, folder)


def test_a_quota_is_a_sentence(base, sub):
    """Free space tells nothing about it."""
    largest = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, largest[1]))
    try:
        with pytest.raises(ValueError, match="cannot be written .*File too large.*set SUBMISSION elsewhere"):
            ensure_submission(base, sub)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, largest)
        signal.signal(signal.SIGXFSZ, handler)
    assert not sub.exists()


def test_room_for_two_models_is_asked_for_first(base, sub, monkeypatch):
    usage = type(shutil.disk_usage("/"))
    size = sum(path.stat().st_size for path in base.glob("*.safetensors"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 0, 2 * size - 1))
    with pytest.raises(ValueError, match="make room or set SUBMISSION"):
        ensure_submission(base, sub)
    assert not sub.exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 0, int(2.05 * size)))
    ensure_submission(base, sub)


@pytest.mark.parametrize("hidden", [False, True])
def test_an_empty_folder_is_filled(base, sub, hidden):
    sub.mkdir(parents=True)
    if hidden:
        (sub / ".gitkeep").touch()
        (sub / "lost+found").mkdir()
    assert ensure_submission(base, sub) is False
    got = {path.name: path.read_bytes() for path in sub.iterdir() if path.is_file()}
    assert got == contents(base) | ({".gitkeep": b""} if hidden else {})


def test_somebody_elses_model_is_moved_aside_not_deleted(base, sub):
    save_public_form(sub, seed=5)
    (sub / "notes.txt").write_text("mine")
    assert ensure_submission(base, sub) is True and read_record(sub) is None
    write_submission(base, sub, values(1).items(), {"score": 0.1})
    write_submission(base, sub, values(2).items(), {"score": 0.2})
    previous = sub.with_name("submission.previous")
    assert seed_of(previous) == 5 and (previous / "notes.txt").read_text() == "mine"
    assert seed_of(sub) == 2 and not (sub / "notes.txt").exists()
    (sub / "notes.txt").write_text("another")  # a note beside our own model
    write_submission(base, sub, values(3).items(), {"score": 0.3})
    assert (sub.with_name("submission.previous1") / "notes.txt").read_text() == "another"
    assert {p.name for p in sub.parent.iterdir()} == {
        "submission", "submission.previous", "submission.previous1", "submission.record.json"
    }  # fmt: skip


# The record


def test_a_record_of_other_weights_is_no_record(base, sub):
    assert read_record(sub) is None
    write_submission(base, sub, values(1).items(), {"score": 0.4})
    record = record_path(sub).read_bytes()
    write_submission(base, sub, values(2).items(), {"score": 0.5})
    record_path(sub).write_bytes(record)
    assert read_record(sub) is None  # as after a kill between the model and its record
    record_path(sub).write_bytes(record[:10])
    assert read_record(sub) is None


# Where folders cannot be exchanged


@pytest.mark.parametrize("form", FORMS)
def test_in_place_the_folder_is_the_bases_again(forms, form, sub, no_exchange):
    base = forms[form]
    sub.mkdir(parents=True)
    (sub / ".mounted").touch()
    ensure_submission(base, sub)
    write_submission(base, sub, values(1).items(), {"score": 0.1})
    assert is_valid_model(sub) is None and seed_of(sub) == 1 and read_record(sub) == {"score": 0.1}
    assert len(list(sub.iterdir())) == len(list(base.iterdir())) + 1
    write_submission(base, sub, values(2).items(), {"score": 0.2})
    assert seed_of(sub) == 2
    old, new = contents(base), contents(sub)
    assert new.pop(".mounted") == b""
    assert old.keys() == new.keys()
    assert all(old[name] == new[name] for name in old if not name.endswith(".safetensors"))
    assert {path.name for path in sub.parent.iterdir()} == {"submission", "submission.record.json"}


@pytest.mark.parametrize("before, after", [FORMS[:2], FORMS[1::-1], (FORMS[2], FORMS[0])])
def test_in_place_over_a_model_in_other_files(forms, before, after, sub, no_exchange):
    shutil.copytree(forms[before], sub)
    (sub / ".mounted").touch()
    (sub / "notes.txt").write_text("mine")
    assert ensure_submission(forms[after], sub) is True
    write_submission(forms[after], sub, values(1).items(), {"score": 0.1})
    assert is_valid_model(sub) is None and seed_of(sub) == 1
    old, new = contents(forms[after]), contents(sub)
    assert new.pop(".mounted") == b"" and old.keys() == new.keys()
    assert all(old[name] == new[name] for name in old if not name.endswith(".safetensors"))
    extras = {"notes.txt": b"mine", ".mounted": b""}
    assert contents(sub.with_name("submission.previous")) == contents(forms[before]) | extras
    (sub / "notes.txt").write_text("another")  # a note beside our own model
    write_submission(forms[after], sub, values(2).items(), {"score": 0.2})
    assert (sub.with_name("submission.previous1") / "notes.txt").read_text() == "another"
    assert {path.name for path in sub.iterdir()} == old.keys() | {".mounted"}
    assert not any(path.is_symlink() for path in sub.iterdir())


def test_a_disk_without_links_is_refused_in_a_sentence(base, sub, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    with pytest.raises(ValueError, match="without symbolic links .*set it to a folder on another disk"):
        ensure_submission(base, sub)
    assert not sub.exists()


# Power cuts


@pytest.mark.parametrize("in_place", [False, True])
def test_everything_is_on_disk_before_the_switch(base, sub, in_place, monkeypatch, request):
    """What kills cannot show: a power cut loses what was not fsynced."""
    write_submission(base, sub, values(1).items(), {})
    if in_place:
        request.getfixturevalue("no_exchange")
    synced, switched, exchange, replace = record_fsync(monkeypatch), [], install.exchange, os.replace
    names = set(contents(base)) | {".submission.new"}

    def checked_exchange(one, other):
        assert names <= set(synced)
        switched.append("exchange")
        exchange(one, other)

    def checked_replace(source, target):
        if Path(target).name == install.STANDING and os.readlink(source) == install.NEW:
            assert names | {install.NEW, install.OLD} <= set(synced) and synced[-1] == "submission"
            switched.append("standing")
        replace(source, target)

    monkeypatch.setattr(install, "exchange", checked_exchange)
    monkeypatch.setattr(os, "replace", checked_replace)
    write_submission(base, sub, values(2).items(), {})
    assert switched == (["exchange", "standing"] if in_place else ["exchange"])
    assert synced[-1] == "out"


# Versions


OTHER = "OTHER_TRANSFORMERS"


@pytest.mark.skipif(OTHER not in os.environ, reason=f"{OTHER} names no folder with another transformers")
def test_with_another_transformers(base, sub):
    """The loading and the contract again, and a submission written by this release, under the other one."""
    write_submission(base, sub, values(1).items(), {"score": 0.5})
    program = (
        "import sys, transformers; from open_r1.checkpoint import is_valid_model; "
        "print(transformers.__version__, is_valid_model(sys.argv[1]))"
    )
    output = run_python(["-c", program, str(sub)], PYTHONPATH=os.environ[OTHER]).split()
    assert output[-1] == "None" and output[-2] != transformers.__version__
    chosen = "every_form or not_whole or zero3 or only_the_values or module_names or in_place or valid_model"
    files = ["tests/test_checkpoint.py", "tests/test_submission.py"]
    run_python(["-m", "pytest", "-q", "-k", chosen, *files], PYTHONPATH=os.environ[OTHER])
