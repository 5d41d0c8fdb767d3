"""The demo's data and its base."""

import hashlib
import re
from pathlib import Path

import pytest
import torch
from datasets import load_from_disk

from methods.demo import draw, report
from methods.demo.pace import StepClock
from open_r1 import validation
from open_r1.checkpoint import load_policy
from open_r1.data import PromptEncoder, load_rows
from open_r1.processor import load_processor
from open_r1.protocol import extract_answer
from open_r1.rollout import FastEngine, TransformersEngine

DEMO = Path(__file__).resolve().parents[1] / "methods/demo"
A_CUBES, B_CUBES = {"gray", "blue", "brown", "yellow"}, {"red", "green", "purple", "cyan"}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """The set B, as the command draws it: by two processes."""
    folder = tmp_path_factory.mktemp("demo")
    draw.draw_sets(["B"], 0, folder, processes=2)
    return folder / "B"


def test_a_row_depends_on_seed_set_and_number_alone(drawn):
    stored = load_from_disk(drawn).cast_column("image", draw.Image(decode=False))
    assert len(stored) == draw.SETS["B"].rows
    for row in (0, 99, 100, 299):
        assert stored[row] == draw.draw_row("B", 0, row)[0]
    first = draw.draw_row("B", 0, 0)[0]["image"]
    assert first not in (draw.draw_row("B", 1, 0)[0]["image"], draw.draw_row("test_B", 0, 0)[0]["image"])


@pytest.mark.parametrize("name", list(draw.SETS))
def test_conditions(name):
    """CLEVR-CoGenT's rule, written out again: the pairs of B never occur in A."""
    spec, pairs, numbers = draw.SETS[name], set(), set()
    for row in range(200):
        things = draw.draw_row(name, 0, row)[1]
        pairs |= {(thing.shape, thing.color) for thing in things}
        numbers.add(len(things))
        assert len({thing.cell for thing in things}) == len(things)
    cubes = {color for shape, color in pairs if shape == "cube"}
    cylinders = {color for shape, color in pairs if shape == "cylinder"}
    assert (cubes, cylinders) == ((A_CUBES, B_CUBES) if name not in ("B", "test_B") else (B_CUBES, A_CUBES))
    assert {color for shape, color in pairs if shape == "sphere"} == A_CUBES | B_CUBES
    assert (min(numbers), max(numbers)) == spec.objects


def counted(question: str, things: list[draw.Thing]) -> int:
    """The answer by another reading of the question: every attribute it names must fit."""
    words = [word.rstrip("s") for word in re.findall(r"\w+", question.lower())]
    known = {*draw.COLORS, *draw.SHAPES, *draw.SIZES}
    asked = {word for word in words if word in known}
    return sum(asked <= {thing.size, thing.color, thing.shape} for thing in things)


@pytest.mark.parametrize("name", ["train", "B", "ood", "base"])
def test_solutions_are_what_the_scene_holds(name):
    answers = set()
    for row in range(300):
        columns, things = draw.draw_row(name, 0, row)
        if columns["problem"] == "Describe the image.":
            assert all(f"{t.place} {t.size} {t.color} {t.shape}" in columns["completion"] for t in things)
            continue
        question = columns["problem"].partition("?")[0]
        answers.add(extract_answer(columns["solution"]))
        assert extract_answer(columns["solution"]) == counted(question, things)
        assert extract_answer(columns["completion"]) == extract_answer(columns["solution"])
    assert answers >= {0, 1, 2, 3, 4, 5}


def test_no_set_shares_an_image_with_another():
    seen: dict[str, str] = {}
    for name, spec in draw.SETS.items():
        for row in range(min(spec.rows, 2500)):
            image = hashlib.sha256(draw.draw_row(name, 0, row)[0]["image"]["bytes"]).hexdigest()
            assert seen.setdefault(image, name) == name, f"row {row} of {name} is in {seen[image]}"


def test_the_base_is_whole_small_and_answers_in_form(drawn):
    base = DEMO / "base"
    assert sum(file.stat().st_size for file in base.iterdir()) <= 10e6
    model = load_policy(base, torch.float32)  # refuses missing and left-over tensors
    processor = load_processor(base)
    engine = FastEngine(model, processor)
    encoder = PromptEncoder(processor, model.config, prompt_mix=0, keep_images=False, seed=0)
    examples = validation.evaluate(
        engine, encoder, load_rows(drawn), rows=range(64), batch_size=64, num_workers=0, progress=False
    )
    summary = validation.summarize(examples)
    assert summary["parsed_pct"] > 90
    assert 10 < summary["accuracy_pct"] < 60  # something to learn, and something to build on


def test_the_tokenizer_writes_any_text():
    tokenizer = load_processor(DEMO / "base").tokenizer
    for text in (
        "Wie viele Würfel, 12 + 3?\n  日本",
        draw.demonstration([]),
        "a1 d4 e5 ab12",
    ):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_gain_is_the_difference_with_the_error_of_both():
    def result(accuracy):
        return {name: {"accuracy_pct": accuracy, "standard_error": 3.0} for name in report.SETS}

    before, after = report.accuracies(result(40.0)), report.accuracies(result(60.0))
    gain = report.gain(before, after)
    assert gain["B"] == pytest.approx((20.0, 3 * 2**0.5))
    assert gain["mean"] == pytest.approx((20.0, (2 * 3) ** 0.5))


def test_the_readme_shows_results_json():
    text = (DEMO / "README.md").read_text()
    report.write_readme()
    assert (DEMO / "README.md").read_text() == text


def test_both_engines_give_the_same_answers(drawn):
    """The grader's way, model.generate prompt by prompt, and the fast engine, on the demo's model."""
    processor = load_processor(DEMO / "base")
    answers = []
    for engine in (FastEngine, TransformersEngine):
        model = load_policy(DEMO / "base", torch.float32)
        encoder = PromptEncoder(processor, model.config, prompt_mix=0, keep_images=False, seed=0)
        answers.append(
            validation.evaluate(
                engine(model, processor), encoder, load_rows(drawn), rows=range(24), batch_size=24,
                num_workers=0, progress=False,
            )
        )  # fmt: skip
    assert answers[0] == answers[1]


def test_the_pace_of_sft_is_that_of_its_later_steps(monkeypatch):
    """However long the start took, and the first steps."""
    now = iter([100.0, 103.0, 104.0, 104.5, 105.0, 105.5, 106.0])  # the first begins 100 s after the start
    monkeypatch.setattr("methods.demo.pace.time.perf_counter", lambda: next(now))
    clock = StepClock()
    for _ in range(6):
        clock.on_step_begin()
        clock.on_step_end()
    assert clock.total == 6 and clock.steps_within(60) == 120 and clock.steps_within(0.1) == 1
