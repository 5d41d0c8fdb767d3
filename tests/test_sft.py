"""The cold start: what it trains on, and what it leaves behind."""

import json

import pytest
import torch
from tiny import noise_image, save_public_form
from transformers import Qwen2VLConfig
from trl import ModelConfig

from open_r1.checkpoint import load_policy
from open_r1.data import DataError, PromptEncoder, load_rows
from open_r1.processor import load_processor
from open_r1.protocol import EVAL_TEMPLATE, TRAIN_TEMPLATE
from open_r1.sft import DemonstrationArguments, SFTArguments, demonstrations, run

COMPLETION = "<think> 1 2 </think> <answer> 2 </answer>"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft") / "base"
    save_public_form(folder)
    return folder


@pytest.fixture
def rows(tmp_path):
    """Four rows, images of different sizes."""
    lines = []
    for i in range(4):
        noise_image(i, 56 + 28 * i, 84).save(tmp_path / f"{i}.png")
        row = {"image": f"{i}.png", "problem": f"How many, {i}?", "solution": i, "completion": COMPLETION}
        lines.append(json.dumps(row))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return tmp_path / "rows.jsonl"


def arguments(out, **values) -> SFTArguments:
    defaults = {"max_steps": 8, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 1}
    return SFTArguments(
        output_dir=str(out),
        use_cpu=True,
        disable_tqdm=True,
        **defaults | {"lr_scheduler_type": "constant"} | values,
    )


def test_a_few_steps_lower_the_loss_and_leave_a_whole_model(base, rows, tmp_path):
    recipe = DemonstrationArguments(dataset_name=str(rows))
    trainer = run(recipe, arguments(tmp_path / "out"), ModelConfig(model_name_or_path=str(base)))
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 8 and losses[-1] < 0.9 * losses[0]
    model = load_policy(tmp_path / "out", torch.float32)  # refuses missing and left-over tensors
    trained = dict(trainer.model.named_parameters())
    before = dict(load_policy(base, torch.float32).named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, trained[name])
    moved = [name for name, parameter in before.items() if not torch.equal(parameter, trained[name])]
    assert any("visual" in name for name in moved) and any("layers" in name for name in moved)
    assert json.loads((tmp_path / "out/config.json").read_text())["use_cache"]  # for generating
    load_processor(tmp_path / "out")


def test_the_prompt_is_the_trainers_and_the_loss_is_on_the_completion(base, rows, tmp_path):
    recipe = DemonstrationArguments(dataset_name=str(rows), prompt_mix=0.0)
    trainer = run(recipe, arguments(tmp_path / "out", max_steps=1), ModelConfig(model_name_or_path=str(base)))
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    processor = load_processor(base)
    encoder = PromptEncoder(
        processor, Qwen2VLConfig.from_pretrained(base), prompt_mix=0.0, keep_images=False, seed=0
    )
    patches = 0
    for i in range(4):
        prompt = encoder.encode(load_rows(rows), i)
        length = prompt.input_ids.numel()
        assert torch.equal(batch["input_ids"][i][:length], prompt.input_ids)
        assert (batch["labels"][i][:length] == -100).all()
        imitated = batch["labels"][i][batch["labels"][i] != -100]
        assert processor.tokenizer.decode(imitated) == f"{COMPLETION}<|im_end|>\n"
        count = len(prompt.pixel_values)
        assert torch.equal(batch["pixel_values"][patches : patches + count], prompt.pixel_values)
        patches += count


def test_images_are_decoded_when_asked_for(rows):
    (rows.parent / "2.png").write_bytes(b"no image")
    made = demonstrations(load_rows(rows), DemonstrationArguments(dataset_name=str(rows)), seed=0)
    assert made[1]["images"][0].size == (84, 84)
    with pytest.raises(DataError, match="cannot be opened"):
        made[2]


def test_the_two_phrasings_or_another_prompt(rows):
    def prompts(**values):
        recipe = DemonstrationArguments(dataset_name=str(rows), **values)
        made = demonstrations(load_rows(rows), recipe, seed=0)
        return [made[i]["prompt"][0]["content"][-1]["text"] for i in range(4)]

    questions = [f"How many, {i}?" for i in range(4)]
    assert prompts(prompt_mix=0.0) == [EVAL_TEMPLATE.format(question=q) for q in questions]
    assert prompts(prompt_mix=1.0) == [TRAIN_TEMPLATE.format(question=q) for q in questions]
    assert prompts(prompt_template="{question} Briefly.") == [f"{q} Briefly." for q in questions]


def test_refusals_name_what_to_set(rows, base, tmp_path):
    recipe = DemonstrationArguments(dataset_name=str(rows), completion_column="rationale")
    with pytest.raises(DataError, match="row 0 .*rationale is None.*--completion_column"):
        demonstrations(load_rows(rows), recipe, seed=0)
    recipe = DemonstrationArguments(dataset_name=str(rows), prompt_template="Count.")
    with pytest.raises(ValueError, match="'Count.' has no {question}"):
        run(recipe, arguments(tmp_path / "out"), ModelConfig(model_name_or_path=str(base)))
