"""The side-by-side measurement, run for real on the tiny model."""

import json
import re
import subprocess
import sys
from pathlib import Path

import PIL.Image
import pytest

from benchmarks import processes
from benchmarks.floor import work
from benchmarks.processes import measure_side
from benchmarks.report import flat_thirds
from benchmarks.settings import RECIPE, Settings, load, save

ROOT = Path(__file__).resolve().parent.parent
QUICK = (
    "--new_tokens", 4, "--prompts", 4, "--group", 2, "--image", "56x84", "--steps", 1, "--warmup", 1,
    "--parts_steps", 1, "--prompts_per_row", 2,
)  # fmt: skip
PARTS = {"prefill", "decode", "rewards", "update", "optimizer", "refresh", "other"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("benchmark")


def step(folder: Path, *flags) -> str:
    command = [sys.executable, "benchmarks/step.py", "--folder", folder, *flags]
    done = subprocess.run(map(str, command), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sweep(folder) -> list[dict]:
    """Two points of one sweep, each added to the file by a command of its own as a reader would."""
    file = folder / "sweep.json"
    step(folder, *QUICK, "--sweep", "group", "--points", 2, 3, "--json", file)
    return json.loads(file.read_text())


def test_both_sides_are_measured(sweep):
    for point, group in zip(sweep, (2, 3), strict=True):
        assert point["sweep"] == "group" and point["settings"]["group"] == group
        assert point["ratio"] == pytest.approx(point["trl_s"] / point["product_s"])
        assert 0 < point["floor_s"] < point["product_s"]
        assert point["product"]["prompt_tokens"] == point["trl"]["prompt_tokens"] > 100
        assert point["commit"] and point["versions"]["trl"].startswith("1.16")
        for side in ("product", "trl"):
            assert len(point[side]["updates_s"]) == 1 and point[side]["peak_gib"]["resident"] > 0
    assert sweep[0]["floor_s"] < sweep[1]["floor_s"]


def test_the_parts_of_the_product_add_up(sweep):
    for point in sweep:
        parts = point["product"]["parts_s"]
        assert set(parts) == PARTS and all(seconds > 0 for seconds in parts.values())
        assert sum(parts.values()) == pytest.approx(point["product"]["parts_update_s"])


def test_the_table_and_the_picture_are_made_from_the_json(sweep, folder):
    table = step(folder, "--table", folder / "sweep.json")
    for text in (f"{sweep[1]['ratio']:.1f} x", "| forward + backward |", "56x84 images"):
        assert text in table
    picture = folder / "sweep.png"
    command = [sys.executable, "benchmarks/plot.py", folder / "sweep.json", picture]
    subprocess.run(command, cwd=ROOT, check=True)
    with PIL.Image.open(picture) as image:
        assert image.size == (1300, 975)


def test_deepspeed_on_both_sides(folder):
    found = json.loads(step(folder, *QUICK, "--mode", "zero2", "--json", "-"))
    assert found["ratio"] > 0 and found["product"]["parts_s"]["optimizer"] > 0


def test_a_flat_run_has_lengths_of_all_kinds(folder):
    flags = ("--flat", 3, "--new_tokens", 64, "--prompts", 4, "--group", 4, "--json", "-")
    flat = json.loads(step(folder, *flags))["flat"]
    assert [row["s"] > 0 for row in flat["updates"]] == [True] * 3
    assert len({row["tokens"] for row in flat["updates"]}) > 1 and flat["last_third"]["mean_tokens"] < 64
    assert flat["last_third"]["gib"]["resident"] > 0 and flat["compiled_at"] == []


def test_compilations_are_counted():
    import torch

    from benchmarks.sides import compiled_graphs

    torch._dynamo.reset()
    double, counts = torch.compile(lambda x: 2 * x, backend="eager", dynamic=False), []
    before = compiled_graphs()
    for size in (2, 3, 3, 4, 4, 4):
        double(torch.ones(size))
        counts.append(compiled_graphs() - before)
    rows = [{"s": 1.0, "graphs": n, "tokens": 5, "resident": 1.0} for n in counts]
    assert flat_thirds(rows)["compiled_at"] == [1, 2, 4]


def test_the_self_check_against_generate(folder):
    flags = ("--selfcheck", 3, "--images", 16, "--image", "56x84", "--json", "-")
    found = json.loads(step(folder, *flags))[0]["selfcheck"]
    assert found["product"]["images"] == 16 and found["generate"]["images"] == 2
    speeds = [found[name]["images_per_s"] for name in ("product", "generate")]
    assert found["ratio"] == pytest.approx(speeds[0] / speeds[1])


def test_a_point_that_ends_its_process_leaves_the_others(folder, monkeypatch):
    """A stand-in for benchmarks/sides.py that dies at the point of 3 prompts."""
    asked = []

    def run(settings, module, side, file, results, **options):
        points = load(file)
        asked.append([point.prompts for point in points])
        alive = [point.prompts for point in points]
        alive = alive[: alive.index(3)] if 3 in alive else alive
        if alive:
            Path(results).write_text(json.dumps([{"prompts": n} for n in alive]))
        return subprocess.CompletedProcess([], 0 if len(alive) == len(points) else -9)

    monkeypatch.setattr(processes, "python", run)
    found = measure_side([Settings(prompts=n) for n in (1, 2, 3, 4)], "trl")
    died = {"error": "its process ended with code -9"}
    assert found == [{"prompts": 1}, {"prompts": 2}, died, {"prompts": 4}]
    assert asked == [[1, 2, 3, 4], [4]]


def test_an_update_that_cannot_be_cut_into_rows_is_refused(folder):
    command = [sys.executable, "benchmarks/step.py", "--prompts", "4", "--prompts_per_row", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "--prompts_per_row 3 does not divide --prompts 4" in done.stderr


def test_the_recipe_is_that_of_train_sh():
    flags = dict(re.findall(r"^\s+--(\w+) ([\w.-]+)", (ROOT / "train.sh").read_text(), re.M))
    assert {name: str(value) for name, value in RECIPE.items()} == {
        name: str(type(value)(flags[name])) for name, value in RECIPE.items()
    }


def test_the_floor_counts_what_pytorch_counts(sweep, folder):
    """Operations of the forward pass of one prompt with its completions, by PyTorch's own counter."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from open_r1.data import PromptEncoder, load_rows
    from open_r1.packing import pack
    from open_r1.processor import load_processor
    from open_r1.scoring import add_scoring_forward
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


def test_what_token_weights_add(folder):
    flags = ("--token_weights", "prpo", *QUICK, "--steps", 2, "--json", "-")
    found = json.loads(step(folder, *flags))["weights"]
    assert found["updates"] == 2 and found["scored"] == 1 and 0 < found["views_s"]
    for times in (found["update_s"], found["processor_s"]):
        assert times["added"] == pytest.approx(times["weighed"] / times["plain"] - 1)


def test_flags_of_a_setting_reach_the_product(tmp_path):
    """As they are, and over what is measured by default."""
    saved = [Settings(flags={"use_peft": True, "prompt_mix": 0.5}), Settings()]
    save(saved, tmp_path / "settings.json")
    with_flags, without = (s.product_flags(tmp_path) for s in load(tmp_path / "settings.json"))
    assert with_flags[with_flags.index("--use_peft") + 1] == "True" and "--use_peft" not in without
    mixes = [flags[flags.index("--prompt_mix") + 1] for flags in (with_flags, without)]
    assert mixes == ["0.5", "0.0"]
