"""The larger model: a Llama text tower in a Qwen2-VL, ray-cast pictures, and arms of another study."""

import argparse
import io
import random
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from methods.arms import plan, run
from methods.demo.draw import Thing
from methods.larger import draw, gguf, make_base, text_tower
from open_r1.checkpoint import load_policy
from open_r1.data import PromptEncoder, load_rows
from open_r1.processor import load_processor, refuse_misfit
from tests.test_demo import A_CUBES, B_CUBES, counted

HEADS, KV_HEADS = 4, 2


# --- the text tower


def packed(value) -> tuple[int, bytes]:
    """A value of a GGUF header: its kind and its bytes."""
    if isinstance(value, str):
        return gguf.TEXT, struct.pack("<Q", len(value.encode())) + value.encode()
    if isinstance(value, list):
        parts = [packed(one) for one in value]
        return gguf.LIST, struct.pack("<IQ", parts[0][0], len(parts)) + b"".join(part for _, part in parts)
    return (6, struct.pack("<f", value)) if isinstance(value, float) else (4, struct.pack("<I", value))


def write_gguf(path: Path, about: dict, tensors: dict[str, torch.Tensor]) -> None:
    """In float32."""
    head, data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(about)), b""
    for name, value in about.items():
        kind, stored = packed(value)
        head += packed(name)[1] + struct.pack("<I", kind) + stored
    for name, tensor in tensors.items():
        shape = tensor.shape[::-1]
        head += packed(name)[1] + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        head += struct.pack("<IQ", gguf.F32, len(data))
        data += tensor.numpy().tobytes()
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)


def side_by_side(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """As GGUF stores queries and keys: number d of a head's first half, then d of its second half."""
    out = torch.empty_like(weight)
    size = len(weight) // heads
    for row in range(len(weight)):
        head, number = divmod(row, size)
        out[head * size + 2 * (number % (size // 2)) + number // (size // 2)] = weight[row]
    return out


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, vocab_size=384, rms_norm_eps=1e-5, tie_word_embeddings=True,
        max_position_embeddings=512, rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def vocabulary() -> tuple[list[str], list[str]]:
    """384 tokens as SmolLM2's are ordered: special ones, bytes, then merges in the order of training."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = ["h o", "ho w", "w o", "m a", "ma n", "man y"]
    merges += [f"{a} {b}" for a in "bcdfg" for b in letters[:23]]
    tokens = special + letters + [merge.replace(" ", "") for merge in merges]
    return tokens + [f"<more {n}>" for n in range(384 - len(tokens))], merges


@pytest.fixture(scope="module")
def folder(llama, tmp_path_factory):
    """What make_base.py makes of a GGUF file with that model, its vocabulary cut to 264 tokens."""
    path = tmp_path_factory.mktemp("larger")
    tokens, merges = vocabulary()
    about = {
        "general.name": "a name", "llama.embedding_length": 64, "llama.feed_forward_length": 96,
        "llama.block_count": 2, "llama.attention.head_count": HEADS, "llama.context_length": 512,
        "llama.attention.head_count_kv": KV_HEADS, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 1e5, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges,
    }  # fmt: skip
    state = {name.removeprefix("model."): tensor for name, tensor in llama.state_dict().items()}
    tensors = {"token_embd.weight": state["embed_tokens.weight"], "output_norm.weight": state["norm.weight"]}
    for layer in range(2):
        for theirs, ours in text_tower.TENSORS.items():
            weight = state[f"layers.{layer}.{ours}.weight"]
            if theirs in ("attn_q", "attn_k"):
                weight = side_by_side(weight, HEADS if theirs == "attn_q" else KV_HEADS)
            tensors[f"blk.{layer}.{theirs}.weight"] = weight
    write_gguf(path / "llama.gguf", about, tensors)
    make_base.uncoached(path / "llama.gguf", 264, 0, path / "base")
    return path


def test_the_logits_are_llamas(llama, folder):
    model = load_policy(folder / "base", torch.float32)
    ids = torch.randint(264, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        own, its = model(input_ids=ids).logits[..., :264], llama(input_ids=ids).logits[..., :264]
    assert its.std() > 0.5
    torch.testing.assert_close(own, its, rtol=1e-4, atol=1e-4)


def test_the_cut_tokenizer_is_the_models(folder):
    """Every text survives, no token is beyond the cut, and what Llama has no token for comes after it."""
    model, processor = load_policy(folder / "base", torch.float32), load_processor(folder / "base")
    refuse_misfit(processor, model.config)
    tokenizer = processor.tokenizer
    text = "how many cyan cubes? <think> 1 a1 </think> 23 größer"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and max(ids) < 264
    assert tokenizer.convert_ids_to_tokens(ids)[:3] == ["how", "Ġ", "man"]  # "many" is beyond the cut
    assert tokenizer.tokenize("12") == ["1", "2"]
    places = [tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|vision_start|>", "<|image_pad|>")]
    assert places[0] == 2 and min(places[1:]) >= 264
    assert model.config.image_token_id == places[2] and len(tokenizer) == 264 + 5


def test_other_weights_are_refused(llama):
    tokenizer = text_tower.cut_tokenizer(*vocabulary(), 264)
    settings = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5, "rope_theta": 1e5,
    }  # fmt: skip
    weights = {name.removeprefix("model."): tensor for name, tensor in llama.state_dict().items()}
    del weights["lm_head.weight"]
    weights["embed_tokens.weight"] = weights["embed_tokens.weight"][:264]
    with pytest.raises(RuntimeError, match="layers.2.mlp.up_proj.weight"):
        more = {"layers.2.mlp.up_proj.weight": torch.zeros(1)}
        text_tower.make_model(weights | more, settings, tokenizer, 0)
    del weights["layers.1.mlp.up_proj.weight"]
    with pytest.raises(RuntimeError, match="layers.1.mlp.up_proj.weight"):
        text_tower.make_model(weights, settings, tokenizer, 0)


def test_blocks():
    """Numbers 0 to 31 in 4 bits, twice, and in 8 bits."""
    halves = bytes(number | (15 - number) << 4 for number in range(16))
    stored = struct.pack("<ee", 0.5, -1.0) + halves
    found = gguf.dequantized(gguf.Q4_1, np.frombuffer(stored * 2, np.uint8))
    expected = torch.cat([torch.arange(16.0), torch.arange(15.0, -1, -1)]) * 0.5 - 1
    assert torch.equal(found, expected.repeat(2))
    stored = struct.pack("<e32b", 0.25, *range(-16, 16))
    assert torch.equal(
        gguf.dequantized(gguf.Q8_0, np.frombuffer(stored, np.uint8)), torch.arange(-16.0, 16) * 0.25
    )


def test_another_file_is_refused(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGML and more")
    with pytest.raises(ValueError, match="is no GGUF file"):
        gguf.GGUF(tmp_path / "x.gguf")


# --- pictures


def picture(columns: dict) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(columns["image"]["bytes"])), int)


@pytest.mark.parametrize("name", ["train", "B", "ood"])
def test_scenes(name):
    """The demo's rules hold, and a row is the same whenever it is drawn."""
    pairs = set()
    for row in range(30):
        columns, things = draw.draw_row(name, 0, row)
        pairs |= {(thing.shape, thing.color) for thing in things}
        assert f"<answer> {counted(columns['problem'].partition('?')[0], things)} </answer>" in (
            columns["completion"]
        )
    cubes = {color for shape, color in pairs if shape == "cube"}
    assert cubes <= (B_CUBES if name == "B" else A_CUBES)
    assert draw.draw_row(name, 0, 29)[0] == columns and picture(columns).shape == (168, 168, 3)


def test_each_thing_is_seen_where_it_stands():
    """Without it the picture is another there; to the right of it and in front of it nothing was."""
    for shape in ("cube", "cylinder", "sphere"):
        empty = np.asarray(draw.render(random.Random(0), [], "floor"), int)
        spots = {}
        for cell, (x, y) in {0: (14.0, 14.0), 3: (98.0, 14.0), 12: (14.0, 98.0)}.items():
            thing = Thing("large", "red", shape, cell, x, y, 11.0)
            change = np.asarray(draw.render(random.Random(0), [thing], "floor"), int) - empty
            redder = change[..., 0] - change[..., 2] > 40  # unlike a shadow
            spots[cell] = np.argwhere(redder).mean(0)  # row, column
            assert 100 < redder.sum() < 1500
        assert spots[3][1] - spots[0][1] > 60 and abs(spots[3][0] - spots[0][0]) < 15  # to the right
        assert spots[12][0] - spots[0][0] > 60  # nearer is lower


def test_rays_enter_solids_where_geometry_says():
    """Straight down and level rays at a sphere, a cylinder and a cube of unit radius."""
    down, level = np.float32([[0, 0, -1]]), np.float32([[1, 0, 0]])
    for shape, top, side in (("sphere", 2.0, 1.0), ("cylinder", 1.9, 0.78), ("cube", 1.52, 0.76)):
        distance, normal = draw.enter(shape, np.float32([0, 0, 5]), down)
        assert distance[0] == pytest.approx(5 - top, abs=1e-3) and normal[0] == pytest.approx([0, 0, 1])
        distance, normal = draw.enter(shape, np.float32([-3, 0, 1]), level)
        assert distance[0] == pytest.approx(3 - side, abs=1e-3) and normal[0] == pytest.approx([-1, 0, 0])
        assert draw.enter(shape, np.float32([-3, 1.2, 1]), level)[0][0] == draw.FAR
        assert draw.enter(shape, np.float32([3, 0, 1]), level)[0][0] == draw.FAR  # behind


def test_a_picture_is_36_tokens(folder, tmp_path):
    few = {"val": replace(draw.SETS["val"], rows=2)}
    draw.demo.draw_sets(["val"], 0, tmp_path, 1, few, draw.draw_row)
    processor = load_processor(folder / "base")
    config = load_policy(folder / "base", torch.float32).config
    encoder = PromptEncoder(processor, config, prompt_mix=0, keep_images=False, seed=0)
    prompt = encoder.encode(load_rows(str(tmp_path / "val")), 0)
    assert int((prompt.input_ids == config.image_token_id).sum()) == 36


# --- arms of another study


def jobs_of(arms: plan.ArmSet, out: Path) -> dict[str, dict]:
    args = argparse.Namespace(
        out=out, seeds=[0], max_steps=5, eval_steps=5, eval_limit=10, test_limit=None, readout_rows=0
    )
    return {job.todo["arm"]: job.todo for job in run.make_jobs([arms], args)}


def test_a_set_names_its_study(tmp_path):
    """Base, rows and flags are its own; SFT of so many seconds waits for nobody."""
    jobs = jobs_of(plan.load_set("larger"), tmp_path)
    runs = plan.ROOT / "methods/larger/runs"
    line = jobs["main"]["command"]
    found = [plan.given(line, name) for name in ("model_name_or_path", "dataset_name", "ood_val_dataset")]
    assert found == [str(runs / "base"), str(runs / "data/train"), str(runs / "data/ood")]
    assert plan.given(line, "prompts_per_row") == 16 and jobs["base"]["base"] == str(runs / "base")
    sft = jobs["sft"]
    assert sft["gpu"] and sft["budget"] == 90 and "as_long_as" not in sft
    assert sft["sft"] == {"learning_rate": 1e-4}
    demo = jobs_of(plan.load_set("ingredients"), tmp_path)["sft"]
    assert not demo["gpu"] and demo["as_long_as"] == "main" and demo["sft"] == {}


def test_studies_are_not_mixed(tmp_path):
    with pytest.raises(plan.Refused, match="objectives is of another study than larger"):
        run.one_study([plan.load_set("larger"), plan.load_set("objectives")])
    text = f"reference: a\nmay_differ: [beta]\nstudy: {{base: {tmp_path}/none}}\narms: {{a: {{}}}}"
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(plan.Refused, match="none does not exist"):
        run.one_study([plan.load_set(str(tmp_path / "mine.yaml"))])
    (tmp_path / "mine.yaml").write_text(text.replace("base:", "bases:"))
    with pytest.raises(plan.Refused, match="is no set of arms"):
        plan.load_set(str(tmp_path / "mine.yaml"))
