"""What a run is expected to take of a GPU: against peaks that were measured, and against the tensors that
the compiled layers keep."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2VLConfig

from benchmarks.random_base import TEXT, VISION
from open_r1 import layers, memory
from open_r1.machine_checks import Device

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
PARAMETERS = 2_208_985_600
CONFIG = Qwen2VLConfig(text_config=TEXT | {"pad_token_id": None}, vision_config=VISION)
CARD = Device("Card", free=40 * GIB, total=48 * GIB)
ZERO3 = json.loads((ROOT / "zero3.json").read_text())
PROMPTS = memory.Longest(tokens=260, patches=748)  # a question about an image of 480 x 320 pixels


def asked(processes: int = 2, rows: int = 8, deepspeed: dict | None = ZERO3, **values) -> SimpleNamespace:
    """The recipe's own settings on GPUs; `rows` an update and process."""
    per_row = values.get("prompts_per_row", 1)
    common = {
        "device": torch.device("cuda"), "bf16": True, "beta": 0.0, "frozen": 0, "adapters": 0,
        "vision_learns": True, "noisy_rollout": 0.0,
        "optim": "adamw_torch_fused",
        "processes": processes, "deepspeed": deepspeed, "deepspeed_settings": deepspeed or {},
        "prompts_per_row": per_row, "gradient_accumulation_steps": rows, "steps_per_generation": rows,
        "prompts_drawn": processes * rows * per_row, "completions_drawn": 8, "num_generations": 8,
        "max_completion_length": 256, "per_device_eval_batch_size": 64, "gradient_checkpointing": False,
    }  # fmt: skip
    return SimpleNamespace(**common | values)


def expected(args, train=PROMPTS, evals=PROMPTS) -> memory.Estimate:
    return memory.estimate(CONFIG, PARAMETERS, args, train, evals)


MEASURED = json.loads((ROOT / "benchmarks/measured/h200_memory.json").read_text())["peaks"]


@pytest.mark.parametrize("peak", MEASURED, ids=lambda peak: f"{peak['mode']} {peak['reserved']}")
def test_it_is_what_was_measured(peak):
    """Within 15 % of the peaks on one H200."""
    stage = ZERO3["zero_optimization"] | {"reduce_bucket_size": peak.get("reduce_bucket_size")}
    deepspeed = {"zero_optimization": stage} if peak["mode"] == "zero3" else None
    args = asked(
        1, peak["prompts"] // peak["prompts_per_row"], deepspeed, prompts_per_row=peak["prompts_per_row"],
        max_completion_length=peak["new_tokens"], gradient_checkpointing=peak["gradient_checkpointing"],
    )  # fmt: skip
    got = expected(args, memory.Longest(tokens=392, patches=748), None)
    assert got.allocated / GIB == pytest.approx(peak["allocated"], rel=0.15)
    assert got.reserved / GIB == pytest.approx(peak["reserved"], rel=0.15)


def test_the_recipe_on_two_gpus_of_48_gb():
    """Which rolls out twice the prompts that it trains on."""
    recipe = (ROOT / "train.sh").read_text()
    assert "--oversample 2 " in recipe and "--prompts_per_row " in recipe
    assert expected(asked(prompts_drawn=32)).reserved <= 42 * GIB


def test_a_layer_keeps_what_is_counted():
    """The tensors that torch.compile saves for the backward pass, without attention's own."""
    hidden, wide, size, heads, tokens = 64, 160, 16, 4, 96

    def weight(*shape):
        return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)

    def kept(function, *inputs) -> int:
        pointers, sizes = {t.untyped_storage().data_ptr() for t in weights}, {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in pointers:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        compiled = torch.compile(function, backend="aot_eager_decomp_partition")
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            alive = compiled(*inputs)
        return sum(sizes.values()) if alive is not None else 0

    x, attended = weight(1, tokens, hidden), weight(1, tokens, heads, size)
    norm, cos = weight(hidden), torch.randn(1, tokens, size, dtype=torch.bfloat16)
    projections = [(weight(n * size, hidden), weight(n * size)) for n in (heads, 2, 2)]
    out, gate, up, down = weight(hidden, hidden), *(weight(wide, hidden) for _ in "gu"), weight(hidden, wide)
    weights = [norm, out, gate, up, down, cos, *(t for pair in projections for t in pair)]
    found = kept(layers.decoder_inputs, x, norm, 1e-6, projections, cos, cos)
    out, *gate_up, down = ((one, None) for one in (out, gate, up, down))
    found += kept(layers.decoder_outputs, x, attended, out, norm, 1e-6, gate_up, down)
    text = SimpleNamespace(hidden_size=hidden, intermediate_size=wide)
    counted = memory.layer_bytes(SimpleNamespace(get_text_config=lambda: text), asked())
    query_key_value = 3 * 2 * hidden
    assert found / tokens == pytest.approx(counted - query_key_value, rel=0.03)


def test_parts():
    """Two cards share 18 bytes a parameter and hold a copy of 2 each; one without DeepSpeed keeps 16."""
    both = memory.weights(PARAMETERS, asked())
    assert sum(both.values()) == PARAMETERS * (2 + 4 + 8 + 4) // 2 + PARAMETERS * 2
    alone = memory.weights(PARAMETERS, asked(1, deepspeed=None, beta=0.04))
    assert sum(alone.values()) == PARAMETERS * (4 + 8 + 4 + 2 + 2) and "weights" not in alone
    plain, less = expected(asked()), expected(asked(gradient_checkpointing=True))
    assert plain.held == less.held and plain.allocated - less.allocated > 4 * GIB
    assert expected(asked(), evals=None).allocated < plain.allocated
    stage = ZERO3["zero_optimization"] | {"offload_optimizer": {"device": "cpu"}}
    offloaded = expected(asked(deepspeed={"zero_optimization": stage}))
    assert sum(plain.held.values()) - sum(offloaded.held.values()) == PARAMETERS * (4 + 8 + 4) // 2
    row, text = "a row's forward and backward", CONFIG.text_config
    blind = expected(asked(vision_learns=False)).phases
    seen = memory.block_bytes(CONFIG, asked()) * CONFIG.vision_config.depth
    seen += 4 * 3 * 2 * 14 * 14  # pixels
    assert plain.phases[row] - blind[row] == PROMPTS.patches * seen
    adapted = expected(asked(vision_learns=False, adapters=10**7, frozen=PARAMETERS)).phases
    assert blind[row] - adapted[row] == (4 + 2) * text.vocab_size * text.hidden_size
    noisy = expected(asked(noisy_rollout=0.3)).phases["prefill"]
    assert noisy == pytest.approx(2 * plain.phases["prefill"], rel=0.01)  # both fit into a row


def test_too_much_is_said_with_the_flags_that_lower_it():
    def check(devices, args):
        return memory.check_memory(devices, CONFIG, PARAMETERS, args, PROMPTS, PROMPTS)

    lines, faults = check([CARD, CARD], asked())
    assert not faults and "warning" not in lines[-1] and "expected on each GPU" in lines[-1]
    lines, faults = check([CARD, CARD], asked(rows=2, prompts_per_row=4))
    assert not faults and "are expected and 40.0 are free; set --per_device_eval_batch_size 16 (" in lines[-1]
    assert "--prompts_per_row 2 --gradient_accumulation_steps 4 --steps_per_generation 4 (" in lines[-1]
    assert "--gradient_checkpointing true (" in lines[-1]
    full = Device("Card", free=10 * GIB, total=48 * GIB)
    _, faults = check([CARD, full], asked())
    assert len(faults) == 1 and "GPU 1 (Card) has 10.0 GiB free and 22.6 are needed" in faults[0]
    host = Device("CPU", free=80 * GIB, total=96 * GIB)  # two processes share it
    _, faults = check([host, host], asked(device=torch.device("cpu"), bf16=False, deepspeed=None))
    assert len(faults) == 1 and "CPU has 80.0 GiB free and" in faults[0]
