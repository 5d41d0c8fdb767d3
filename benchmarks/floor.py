"""The least time that an update can take on this machine: counted work over two measured ceilings.

    python -m benchmarks.floor {cpu|cuda}        prints the ceilings as JSON

Work is what one update needs and no less: every matrix product and attention score once, every weight, key
and value read once a decode step, a group's prompt once for its G completions, no recomputation, nothing for
launches, Python, rewards or logging.

Legend
  P  prompt tokens      G  completions a prompt     T  new tokens of each     R  prompts of the update
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.settings import Settings

Work = tuple[float, float]  # floating point operations, bytes


def ceilings(device: str) -> dict[str, float]:
    """FLOP/s of a large matrix product (bf16 on a GPU, float32 on the CPU) and bytes/s, read plus written, of
    a large copy."""
    import torch

    cuda = device == "cuda"
    size, dtype = (8192, torch.bfloat16) if cuda else (1024, torch.float32)
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    source = torch.zeros(2**30 if cuda else 2**27, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)

    def best(work: Callable[[], Any]) -> float:
        times = []
        for _ in range(10):
            started = time.perf_counter()
            work()
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        return min(times)

    return {
        "flops_per_s": 2 * size**3 / best(lambda: a @ b),
        "bytes_per_s": 2 * source.numel() / best(lambda: target.copy_(source)),
    }


def floor(settings: Settings, prompt_tokens: int, limits: dict[str, float]) -> dict[str, float]:
    """Seconds of each part of an update, each the larger of its arithmetic and its bytes, and their sum as
    "update_s"."""
    parts = {
        name: max(flops / limits["flops_per_s"], size / limits["bytes_per_s"])
        for name, (flops, size) in work(settings, prompt_tokens).items()
    }
    return parts | {"update_s": sum(parts.values())}


def work(settings: Settings, prompt_tokens: int) -> dict[str, Work]:
    config = json.loads((settings.base / "config.json").read_text())
    P, G, T, R = prompt_tokens, settings.group, settings.new_tokens, settings.prompts
    width = 2 if settings.cuda else 4  # bytes of a computed value
    layers, hidden, vocabulary = config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * config["intermediate_size"]
    head = hidden * vocabulary
    patches = image_patches(settings.width, settings.height)
    tower, vision = vision_parameters(config["vision_config"]), vision_flops(config["vision_config"], patches)
    parameters = layers * layer + head + tower

    def text(tokens: float, seen: float) -> float:
        """All layers on `tokens` tokens that look at `seen` tokens in all (queries x keys)."""
        return layers * (2 * layer * tokens + 4 * hidden * seen)

    # A completion's last token is scored, not fed. Token t of a completion sees the prompt and t of its own.
    fed = T - 1
    prompt_seen, completion_seen = P * (P + 1) / 2, fed * P + fed * (fed + 1) / 2
    prefill = R * (vision + text(P, prompt_seen) + 2 * head)
    decode = R * G * (text(fed, completion_seen) + 2 * head * fed)
    forward = R * (vision + text(P + G * fed, prompt_seen + G * completion_seen) + 2 * head * G * T)
    cache = 2 * layers * kv * width  # bytes of a token's keys and values
    read_per_step = (layers * layer + head) * width + cache * R * (P + G * T / 2)
    policy_width = 2 if settings.mode != "none" and settings.cuda else 4  # float32 masters under autocast
    return {
        "prefill": (prefill, parameters * width),
        "decode": (decode, fed * read_per_step),
        "update": (3 * forward, 3 * parameters * width),  # a backward pass is two forward passes
        # AdamW in float32 reads weight, gradient and two moments, and writes all but the gradient.
        "optimizer": (0, 28 * parameters),
        "refresh": (0, (policy_width + width) * parameters),
    }


def image_patches(width: int, height: int) -> int:
    """Patches of 14 x 14 pixels; images are resized to whole merged patches of 28 x 28."""
    return 4 * round(width / 28) * round(height / 28)


def vision_parameters(vision: dict[str, Any]) -> float:
    block, ends = _vision_block(vision), _vision_ends(vision)
    return vision["depth"] * block + sum(ends)


def vision_flops(vision: dict[str, Any], patches: int) -> float:
    """One image through the tower; every patch sees all patches of its image."""
    embedding, merger = _vision_ends(vision)
    blocks = vision["depth"] * (_vision_block(vision) * patches + 2 * vision["embed_dim"] * patches**2)
    return 2 * (embedding * patches + blocks + merger * patches / 4)


def _vision_block(vision: dict[str, Any]) -> float:
    return (4 + 2 * vision["mlp_ratio"]) * vision["embed_dim"] ** 2


def _vision_ends(vision: dict[str, Any]) -> tuple[float, float]:
    """Weights of the patch embedding and of the merger of 2 x 2 patches."""
    merged = 4 * vision["embed_dim"]
    embedding = 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2 * vision["embed_dim"]
    return embedding, merged * merged + merged * vision["hidden_size"]


if __name__ == "__main__":
    print(json.dumps(ceilings(sys.argv[1])))
