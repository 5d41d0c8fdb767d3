"""The side-by-side measurement, run for real on the tiny model."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.floor import work
from benchmarks.settings import RECIPE, Settings

ROOT = Path(__file__).resolve().parent.parent
QUICK = (
    "--new_tokens", 4, "--prompts", 4, "--group", 2, "--image", "56x84", "--steps", 1, "--warmup", 1,
    "--parts_steps", 1, "--prompts_per_row", 2,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("benchmark")


def step(folder: Path, *flags) -> str:
    command = [sys.executable, "benchmarks/step.py", "--folder", folder, *flags]
    done = subprocess.run(map(str, command), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def result(folder) -> dict:
    return json.loads(step(folder, *QUICK, "--json", "-"))


def test_both_sides_are_measured(result):
    assert result["ratio"] == pytest.approx(result["trl_s"] / result["product_s"])
    assert 0 < result["floor_s"] < result["product_s"]
    assert result["product"]["prompt_tokens"] == result["trl"]["prompt_tokens"] > 100
    assert result["commit"] and result["versions"]["trl"].startswith("1.16")
    for side in ("product", "trl"):
        assert len(result[side]["updates_s"]) == 1 and result[side]["peak_gib"]["resident"] > 0


def test_the_parts_of_the_product_add_up(result):
    parts = result["product"]["parts_s"]
    assert set(parts) == {"prefill", "decode", "rewards", "update", "optimizer", "refresh", "other"}
    assert all(seconds > 0 for seconds in parts.values())
    assert sum(parts.values()) == pytest.approx(result["product"]["parts_update_s"])


def test_the_table_is_made_from_the_json(result, folder):
    file = folder / "out.json"
    file.write_text(json.dumps(result))
    table = step(folder, "--table", file)
    for text in (f"{result['ratio']:.1f} x", "| forward + backward |", "56x84 images"):
        assert text in table


def test_deepspeed_on_both_sides(folder):
    found = json.loads(step(folder, *QUICK, "--mode", "zero2", "--json", "-"))
    assert found["ratio"] > 0 and found["product"]["parts_s"]["optimizer"] > 0
    assert json.loads((folder / "zero2.json").read_text())["zero_optimization"]["stage"] == 2


def test_an_update_that_cannot_be_cut_into_rows_is_refused(folder):
    command = [sys.executable, "benchmarks/step.py", "--prompts", "4", "--prompts_per_row", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "--prompts_per_row 3 does not divide --prompts 4" in done.stderr


def test_the_recipe_is_that_of_train_sh():
    flags = dict(re.findall(r"^\s+--(\w+) ([\w.-]+)", (ROOT / "train.sh").read_text(), re.M))
    assert {name: str(value) for name, value in RECIPE.items()} == {
        name: str(type(value)(flags[name])) for name, value in RECIPE.items()
    }


def test_the_floor_counts_what_pytorch_counts(result, folder):
    """Operations of the forward pass of one prompt with its completions, by PyTorch's own counter."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from open_r1.data import PromptEncoder, load_rows
    from open_r1.packing import add_scoring_forward, pack
    from open_r1.processor import load_processor
    from tests.tiny import tiny_model

    settings = Settings(folder=str(folder), new_tokens=6, prompts=1, group=3, width=56, height=84)
    model = tiny_model()
    processor = load_processor(settings.base)
    encoder = PromptEncoder(processor, model.config, prompt_mix=0.0, keep_images=False, seed=0)
    prompt = encoder.encode(load_rows(settings.rows), 0)
    row = pack([(prompt, [torch.randint(0, 256, (6,)) for _ in range(3)])])
    add_scoring_forward(model)
    # The kernel of plain products: the others are not counted on the CPU.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(**row.model_inputs())
    counted = work(settings, prompt.input_ids.numel())["update"][0] / 3
    length, prompt_length, fed = row.input_ids.numel(), prompt.input_ids.numel(), 5
    seen = prompt_length * (prompt_length + 1) / 2 + 3 * (fed * prompt_length + fed * (fed + 1) / 2)
    masked = 4 * 64 * 2 * (length**2 - seen)  # PyTorch counts the scores that the mask throws away
    assert counted + masked == pytest.approx(counter.get_total_flops(), rel=1e-3)
