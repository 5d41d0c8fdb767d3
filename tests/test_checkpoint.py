import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2VLForConditionalGeneration
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from open_r1 import checkpoint
from open_r1.checkpoint import (
    float32_rope,
    is_valid_model,
    load_policy,
    local_model,
)
from tests.tiny import save_public_form, tiny_model, tiny_processor

FORMS = ["public", "library", "library in shards"]
SECOND_SHARD = "model-00002-of-00002.safetensors"


def save_form(form: str, folder: Path) -> None:
    """tiny_model(0) in bfloat16, as the public checkpoint or as the installed transformers writes it."""
    if form == "public":
        save_public_form(folder)
    else:
        size = "100KB" if "shards" in form else "1GB"
        tiny_model(dtype=torch.bfloat16).save_pretrained(folder, max_shard_size=size)
        tiny_processor().save_pretrained(folder)


@pytest.fixture(scope="module")
def public(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("public")
    save_public_form(folder)
    return folder


@pytest.fixture
def broken(public, tmp_path) -> Path:
    """A copy of the public form for a test to break."""
    return Path(shutil.copytree(public, tmp_path / "broken"))


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("form", FORMS)
def test_load_policy_reads_every_form_exactly(form, tmp_path):
    save_form(form, tmp_path)
    model = load_policy(tmp_path, torch.float32)
    assert type(model) is Qwen2VLForConditionalGeneration
    assert model.config._attn_implementation == "sdpa"
    for (name, got), expected in zip(
        model.named_parameters(), tiny_model(dtype=torch.bfloat16).parameters(), strict=True
    ):
        assert got.dtype == torch.float32 and torch.equal(got, expected.float()), name
    assert {p.dtype for p in load_policy(tmp_path, "auto").parameters()} == {torch.bfloat16}
    assert is_valid_model(tmp_path) is None


def drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / SECOND_SHARD)
    del tensors["model.norm.weight"]
    save_file(tensors, folder / SECOND_SHARD, metadata={"format": "pt"})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def add_tensor(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.extra.weight"] = SECOND_SHARD
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    tensors = load_file(folder / SECOND_SHARD) | {"model.extra.weight": torch.ones(3)}
    save_file(tensors, folder / SECOND_SHARD, metadata={"format": "pt"})


def truncate_shard(folder: Path) -> None:
    os.truncate(folder / SECOND_SHARD, 5000)


def put_nan(folder: Path) -> None:
    tensors = load_file(folder / SECOND_SHARD)
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, folder / SECOND_SHARD, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda folder: edit(folder / "config.json", model_type="llama"), "'llama'"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (lambda folder: edit(folder / "config.json", intermediate_size=96), "6 mismatched_keys"),
        (drop_tensor, "1 missing_keys, first model.language_model.norm.weight"),
        (add_tensor, "1 unexpected_keys"),
        (truncate_shard, "has 5,000 bytes and"),
        (lambda folder: (folder / SECOND_SHARD).unlink(), "has no readable header (FileNotFoundError)"),
    ],
)
def test_a_model_that_is_not_whole_is_refused_in_one_sentence(broken, damage, words):
    damage(broken)
    with pytest.raises(ValueError, match="^.*$") as refusal:  # "." matches no line break
        load_policy(broken, torch.float32)
    assert words in str(refusal.value) and str(broken) in str(refusal.value)
    assert is_valid_model(broken) == str(refusal.value)


def test_is_valid_model_loads_the_processor(broken):
    (broken / "tokenizer.json").write_text("{}")
    assert "no processor that loads" in is_valid_model(broken)


def test_is_valid_model_sees_a_nan(broken):
    put_nan(broken)
    assert "not finite, first in model.language_model.norm.weight" in is_valid_model(broken)


def test_a_missing_folder_is_no_hub_name(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="does not exist; set MODEL"):
        local_model(tmp_path / "nowhere")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="^outputs/a/submission is no folder, and the hub does not give it"):
        local_model("outputs/a/submission")  # no valid name there: nothing is asked for


def test_rope_frequencies_become_float32_again():
    model, exact = tiny_model(), dict(tiny_model().named_buffers())
    assert len(exact) == 4
    model.bfloat16()
    assert all(buffer.dtype == torch.bfloat16 for buffer in model.buffers())
    float32_rope(model)
    for name, buffer in model.named_buffers():
        assert buffer.dtype == torch.float32 and torch.equal(buffer, exact[name]), name


def test_load_policy_hides_the_zero3_configuration_and_puts_it_back(public, broken):
    drop_tensor(broken)
    zero3 = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})  # transformers keeps a weak reference only
    model = load_policy(public, torch.float32)
    assert not any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    assert is_deepspeed_zero3_enabled()
    with pytest.raises(ValueError):
        load_policy(broken, torch.float32)
    assert is_deepspeed_zero3_enabled()
    checkpoint.deepspeed_integration.unset_hf_deepspeed_config()
    assert zero3.is_zero3()


ENGINE = """
import json, os, sys, torch
import deepspeed.ops
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled for minutes
import deepspeed
from accelerate import PartialState
from transformers.integrations import HfDeepSpeedConfig
from open_r1.checkpoint import load_policy
from tests.tiny import tiny_model

expected = dict(tiny_model().named_buffers())
os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
PartialState(backend="gloo")
zero3 = {
    "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-6, "torch_adam": True}},
}
active = HfDeepSpeedConfig(zero3)
model = load_policy(sys.argv[1], torch.bfloat16)
deepspeed.initialize(model=model, model_parameters=model.parameters(), config=zero3)
print(json.dumps({
    "partitioned": all(hasattr(p, "ds_id") for p in model.parameters()),
    "exact": all(torch.equal(b, expected[n]) for n, b in model.named_buffers()),
}))
"""


def test_rope_frequencies_stay_float32_in_a_bf16_zero3_engine(public):
    """What DeepSpeed makes of the model that load_policy hands it, in a process of its own with one rank."""
    result = run_python(["-c", ENGINE, str(public)], DS_ACCELERATOR="cpu", **one_rank())
    assert json.loads(result.splitlines()[-1]) == {"partitioned": True, "exact": True}


def one_rank() -> dict[str, str]:
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def run_python(arguments: list[str], **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment, cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def record_fsync(monkeypatch) -> list[str]:
    """The names of the files and folders that are fsynced from now on."""
    synced, fsync = [], os.fsync

    def recorded(handle):
        synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", recorded)
    return synced
