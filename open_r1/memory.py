"""How much memory of a GPU a run will take, told from the configuration, the flags and the longest prompts.

A run holds some parts from its beginning to its end; what a phase of an update (rollout, rows, optimizer
step) needs beside them is freed before the next, so that the largest phase counts. Each part is a count of
tensors: those that the compiled layers keep for the backward pass were counted on the functions of layers.py
as torch.compile partitions them.

Legend
  P  parameters       L  tokens of a row      N  completion tokens of a row     V  vocabulary
  H  hidden size      I  width of the text tower's MLP
  W  hidden size of the vision tower          M  width of its MLP
All sizes are in bytes.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import Qwen2VLConfig, Qwen2VLProcessor

from .arguments import GRPOArguments
from .data_survey import RowFacts, image_tokens
from .machine_checks import Device, Found, gib
from .packing import padded_length
from .protocol import MAX_NEW_TOKENS
from .rollout import PREFILL_TOKENS
from .scoring import LOGITS_CHUNK

GIB = 2**30
MAX_LIVE = SUB_GROUP = 10**9  # DeepSpeed's defaults: parameters gathered at once, and stepped at once
# PyTorch's allocator keeps blocks that no later tensor fits into. The one number here that was fitted:
# reserved over allocated is 1.03 to 1.09 of the peaks in benchmarks/measured/h200_memory.json. After another
# `python benchmarks/memory.py`, this is the line to change.
RESERVED_OVER_ALLOCATED = 1.07
# Outside of PyTorch: CUDA's context and kernels (0.82 GiB on an H200), and NCCL's buffers where there is a
# process group (0.86 GiB).
KERNELS, NCCL = int(0.8 * GIB), int(0.9 * GIB)


@dataclass(frozen=True)
class Longest:
    """The most of any prompt of some rows."""

    tokens: int  # image placeholders included
    patches: int  # of its images


def longest_of(facts: Sequence[RowFacts], processor: Qwen2VLProcessor) -> Longest:
    merged = processor.image_processor.merge_size**2
    tokens = [sum(image_tokens(processor, *size) for size in fact.sizes) for fact in facts]
    return Longest(max(fact.tokens for fact in facts), merged * max(tokens))


@dataclass(frozen=True)
class Estimate:
    held: dict[str, int]  # from the first update to the last
    phases: dict[str, int]  # beside it, one at a time
    outside: int  # of PyTorch

    @property
    def allocated(self) -> int:
        return sum(self.held.values()) + max(self.phases.values())

    @property
    def reserved(self) -> int:
        """As torch.cuda.max_memory_reserved counts it."""
        return int(RESERVED_OVER_ALLOCATED * self.allocated)

    @property
    def total(self) -> int:
        return self.reserved + self.outside


def estimate(
    config: Qwen2VLConfig, parameters: int, args: GRPOArguments, train: Longest, evals: Longest | None = None
) -> Estimate:
    """Of each process. `parameters` are the model's; `evals` are the prompts of a validation."""
    held = weights(parameters, args) | buckets(config, args) | caches(config, args, train, evals)
    if gradients_come_and_go(args):
        del held["gradients"]
    return Estimate(
        {name: int(size) for name, size in held.items()},
        {name: int(size) for name, size in phases(config, parameters, args, train).items()},
        KERNELS + (NCCL if args.processes > 1 or zero(args) else 0) if args.device.type == "cuda" else 0,
    )


# --- what is held -----------------------------------------------------------------------------------------


def low_bytes(args: GRPOArguments) -> int:
    return 2 if args.bf16 else 4


def zero(args: GRPOArguments) -> dict:
    """DeepSpeed's zero_optimization; empty without it."""
    return args.deepspeed_settings.get("zero_optimization", {})


def offloaded(args: GRPOArguments, what: str) -> bool:
    return zero(args).get(f"offload_{what}", {}).get("device", "none") != "none"


def weights(parameters: int, args: GRPOArguments) -> dict[str, int]:
    """What follows from the model's size alone, and is certain before any activation."""
    low, stage = low_bytes(args), zero(args).get("stage", 0)
    policy = parameters + args.adapters
    trained = policy - args.frozen

    def share(from_stage: int, count: int = trained) -> float:
        return count / (args.processes if stage >= from_stage else 1)

    on_gpu = not offloaded(args, "optimizer")
    whole = low * share(3, policy) * (not offloaded(args, "param"))
    needs = {"weights": whole} if stage else {"frozen weights": low * args.frozen}
    needs["float32 masters"] = 4 * share(1) * on_gpu
    if "adamw" in args.optim:
        needs["Adam"] = 8 * share(1) * on_gpu
    needs["gradients"] = 4 * share(2) * on_gpu
    if not stage and args.processes > 1:
        needs["gradient buckets"] = 4 * trained  # of DistributedDataParallel
    needs["rollout copy"] = low * parameters  # its joint tensors are what its modules' weights are views of
    if args.beta and not args.adapters:
        needs["reference"] = low * parameters
    return {name: int(size) for name, size in needs.items() if size}


def buckets(config: Qwen2VLConfig, args: GRPOArguments) -> dict[str, int]:
    """Where DeepSpeed puts gradients together to reduce them; two take turns in stages 1 and 2."""
    settings, hidden = zero(args), config.get_text_config().hidden_size
    if not settings.get("stage"):
        return {}
    size = settings.get("reduce_bucket_size", 5 * 10**8)
    size = hidden**2 if size == "auto" else size  # as transformers fills it in
    return {"gradient bucket": low_bytes(args) * size * (1 if settings["stage"] == 3 else 2)}


def gradients_come_and_go(args: GRPOArguments) -> bool:
    """Without DeepSpeed, and with one row an update, they are made while the activations are freed."""
    return not args.deepspeed and args.processes == 1 and args.gradient_accumulation_steps == 1


def caches(
    config: Qwen2VLConfig, args: GRPOArguments, train: Longest, evals: Longest | None
) -> dict[str, int]:
    """Keys and values of the training and of the validation batch, which both stay for their captured graphs,
    with the logits and probabilities of these graphs."""
    text, rollout = config.get_text_config(), args.prompts_drawn // args.processes
    rows = rollout * args.completions_drawn
    batches = {"rollout's keys and values": (rows, train.tokens + args.max_completion_length, 12)}
    if evals:
        batches["validation's"] = (args.per_device_eval_batch_size, evals.tokens + MAX_NEW_TOKENS, 4)
    needs = {}
    head = text.hidden_size // text.num_attention_heads
    slot = 2 * low_bytes(args) * text.num_hidden_layers * text.num_key_value_heads * head
    for name, (rows, slots, sampled) in batches.items():
        graph = rows * text.vocab_size * (low_bytes(args) + sampled)  # logits, float32, and float64 to sum up
        needs[name] = rows * (-(-slots // 64) * 64) * slot + graph
    return needs


# --- what a phase needs -----------------------------------------------------------------------------------


def phases(config: Qwen2VLConfig, parameters: int, args: GRPOArguments, train: Longest) -> dict[str, int]:
    return {
        "prefill": prefill(config, args, train),
        "a row's forward and backward": row(config, parameters, args, train),
        "the optimizer's step": step(config, parameters, args),
    }


def prefill(config: Qwen2VLConfig, args: GRPOArguments, train: Longest) -> int:
    """One prefill row: its MLPs' inputs, and the vision tower's with the pixels in float32. The views of
    token weights are scored in rows that are no longer, so that they are no phase of their own."""
    text, vision, low = config.get_text_config(), config.vision_config, low_bytes(args)
    prompts = args.prompts_drawn // args.processes * (2 if args.noisy_rollout else 1)
    together = min(prompts, PREFILL_TOKENS[args.device.type] // train.tokens + 1)
    tokens, patches = together * train.tokens, together * train.patches
    width = vision.embed_dim
    towers = max(
        tokens * (3 * text.intermediate_size + 6 * text.hidden_size),
        patches * (2 * vision.mlp_ratio + 6) * width,
    )
    return low * (towers + prompts * text.vocab_size) + 4 * patches * patch_values(vision)


def row(config: Qwen2VLConfig, parameters: int, args: GRPOArguments, train: Longest) -> int:
    """The longest packed row, when its backward pass begins: all activations, the logits of a chunk, the
    head's gradient, and what ZeRO-3 has gathered."""
    text, vision, low = config.get_text_config(), config.vision_config, low_bytes(args)
    completions = args.prompts_per_row * args.num_generations
    scored = completions * args.max_completion_length
    tokens = padded_length(args.prompts_per_row * train.tokens + scored - completions)
    patches = args.prompts_per_row * train.patches if args.vision_learns else 0
    of_text, of_vision = tokens * layer_bytes(config, args), patches * block_bytes(config, args)
    layers, blocks = text.num_hidden_layers, vision.depth
    head = text.vocab_size * text.hidden_size
    chunk = min(scored, LOGITS_CHUNK) * text.vocab_size
    # Logits and their gradient; the head's gradient in float32 and, of a chunk, in the weights' type. LoRA
    # leaves the head as it is.
    logits = 2 * low * chunk + (0 if args.adapters else (4 + low) * head)
    if args.gradient_checkpointing:
        residual = low if args.deepspeed else 4
        kept = residual * (layers * tokens * text.hidden_size + blocks * patches * vision.embed_dim)
        activations = kept + max(logits, 2 * of_text, 2 * of_vision)  # one layer again, with its gradients
    else:
        activations = layers * of_text + blocks * of_vision + logits
    inputs = 4 * patches * patch_values(vision) + 3 * low * tokens * text.hidden_size
    return activations + inputs + gathered(parameters, args) + low * head


def layer_bytes(config: Qwen2VLConfig, args: GRPOArguments) -> int:
    """What a decoder layer keeps of a token: five inputs as wide as the residual, query, key and value (the
    two repeated for all heads), and gate, up and their product."""
    text = config.get_text_config()
    hidden, wide = text.hidden_size, text.intermediate_size
    if args.deepspeed or not args.bf16:
        return low_bytes(args) * (8 * hidden + 3 * wide)
    return 20 * hidden + 6 * wide  # autocast: a float32 residual, read twice


def block_bytes(config: Qwen2VLConfig, args: GRPOArguments) -> int:
    """As layer_bytes, of a vision block and a patch; the activation's input and output are kept."""
    vision = config.vision_config
    return low_bytes(args) * (8 + 2 * vision.mlp_ratio) * vision.embed_dim


def gathered(parameters: int, args: GRPOArguments) -> int:
    """Whole parameters under ZeRO-3 (on one rank they are their own shards), or the copies that autocast
    makes for the backward pass."""
    settings = zero(args)
    if settings.get("stage", 0) == 3:
        live = settings.get("stage3_max_live_parameters", MAX_LIVE)
        copied = args.processes > 1 or offloaded(args, "param")
        return low_bytes(args) * min(parameters, live) if copied else 0
    return 2 * parameters if args.bf16 and not args.deepspeed else 0


def step(config: Qwen2VLConfig, parameters: int, args: GRPOArguments) -> int:
    """DeepSpeed flattens the gradients of a sub-group, and takes a gradient's norm in float64. Gradients that
    come and go are whole now."""
    settings, text = zero(args), config.get_text_config()
    stage, trained = settings.get("stage", 0), parameters + args.adapters - args.frozen
    if gradients_come_and_go(args):
        return 4 * trained
    if not stage or offloaded(args, "optimizer"):
        return 0
    shard = trained / args.processes
    largest = text.vocab_size * text.hidden_size / (args.processes if stage == 3 else 1)
    group = settings.get("sub_group_size", SUB_GROUP) if stage == 3 else shard
    return max(4 * min(shard, group), 8 * largest)


def patch_values(vision) -> int:
    return vision.in_channels * vision.temporal_patch_size * vision.patch_size**2


# --- what a run is told before its first update -----------------------------------------------------------


def check_memory(
    found: Sequence[Device], config: Qwen2VLConfig, parameters: int, args: GRPOArguments, train: Longest,
    evals: Longest | None,
) -> Found:  # fmt: skip
    """What is certain must fit. Of what is expected, too much is said with the flags that lower it: the
    rehearsal, which comes before the first update, shows whether it fits."""
    on_cpu = args.device.type != "cuda"
    expected = estimate(config, parameters, args, train, evals)
    sharing = args.processes if on_cpu else 1  # of one memory
    found = found[:1] if on_cpu else found
    lines, free = table(expected, on_cpu), min(device.free for device in found) // sharing
    certain = sum(weights(parameters, args).values())
    more = "a machine with more memory" if on_cpu else "more GPUs"
    short = [(rank, device) for rank, device in enumerate(found) if device.free < certain * sharing]
    if short:
        return lines, [
            f"{device.name if on_cpu else f'GPU {rank} ({device.name})'} has {gib(device.free)} GiB free and "
            f"{gib(certain * sharing)} are needed before any activation: stop what "
            f"else uses it, or take {more}"
            for rank, device in short
        ]
    if expected.total > free:
        ways = [f"{flags} ({gib(size)})" for flags, size in savings(config, parameters, args, train, evals)]
        lines.append(
            f"warning: {gib(expected.total)} GiB are expected and {gib(free)} are free; "
            f"{'set ' + ', or '.join(ways) if ways else 'no flag lowers it: take ' + more}"
        )
    return lines, []


def table(expected: Estimate, on_cpu: bool) -> list[str]:
    """A line for each part, in GiB."""
    largest = max(expected.phases, key=expected.phases.get)
    parts = [*expected.held.items(), (largest, expected.phases[largest])]
    lines = [f"{name:<32}{gib(size):>8} GiB" for name, size in parts]
    if on_cpu:
        return [*lines, f"{'in all, of each process':<32}{gib(expected.allocated):>8} GiB"]
    unused = expected.reserved - expected.allocated
    rest = {"blocks kept and not used": unused, "kernels, NCCL": expected.outside}
    lines += [f"{name:<32}{gib(size):>8} GiB" for name, size in rest.items()]
    total = f"{'expected on each GPU':<32}{gib(expected.total):>8} GiB"
    return [*lines, f"{total}, of which PyTorch reserves {gib(expected.reserved)}"]


def savings(
    config: Qwen2VLConfig, parameters: int, args: GRPOArguments, train: Longest, evals: Longest | None
) -> list[tuple[str, int]]:
    """Flags that lower the total, each with those before it, the cheapest first; and the total with them."""
    changes = []
    if evals and args.per_device_eval_batch_size > 16:
        changes.append({"per_device_eval_batch_size": 16})
    changes += smaller_rows(args)
    found, given, best = [], {}, estimate(config, parameters, args, train, evals).total
    for change in changes:
        given |= change
        changed = copy.copy(args)
        vars(changed).update(given)
        total = estimate(config, parameters, changed, train, evals).total
        if total < best:
            best = total
            found.append((" ".join(flags_of(given)), total))
    return found


def flags_of(values: dict[str, int | bool]) -> list[str]:
    return [part for name, value in values.items() for part in (f"--{name}", str(value).lower())]


def smaller_rows(args: GRPOArguments) -> list[dict[str, int | bool]]:
    """Flags for rows that need less, the cheaper first. The update stays the same prompts: what leaves a row
    becomes a row of its own."""
    rows, changes = args.prompts_per_row, []
    if rows > 1:
        changes.append(fewer_prompts(args, max(n for n in range(1, rows) if rows % n == 0)))
    if not args.gradient_checkpointing:
        one = fewer_prompts(args, 1) if rows > 1 else {}
        changes.append(one | {"gradient_checkpointing": True})
    return changes


def fewer_prompts(args: GRPOArguments, prompts: int) -> dict[str, int]:
    times = args.prompts_per_row // prompts
    return {
        "prompts_per_row": prompts,
        "gradient_accumulation_steps": args.gradient_accumulation_steps * times,
        "steps_per_generation": args.steps_per_generation * times,
    }
