"""Measures one side, the product or TRL's GRPOTrainer, in a process of its own.

    python -m benchmarks.sides {product|trl|weights|flat|selfcheck|memory} SETTINGS.json RESULTS.json

The settings are a list of points, measured one after the other; the results are written behind each.
benchmarks/processes.py starts it and sets its environment; step.py puts the sides together.
"""

import gc
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.clocks import PartsClock, UpdateClock, memory_gib, peak_memory_gib
from benchmarks.memory import measure_memory
from benchmarks.rewards import all_different
from benchmarks.selfcheck_speed import measure_selfcheck
from benchmarks.settings import Settings, load

PARTS = ("prefill", "decode", "rewards", "update", "optimizer", "refresh")


def start_deepspeed_on_cpu() -> None:
    """accelerate has no CPU path for DeepSpeed: a state that is made first with gloo gives it one."""
    import deepspeed.ops
    from accelerate import PartialState

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # plain gloo, not a C++ build of a minute
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")


class Measurement:
    """Warm-up, then the measured updates; what comes behind them can have its parts timed."""

    def __init__(self, settings: Settings, warmup: int, time_parts=lambda clock: None):
        self.settings, self.parts, self.peak = settings, PartsClock(), {}
        self.begin, self.end = warmup, warmup + settings.steps

        def measured() -> None:
            self.peak = peak_memory_gib()
            time_parts(self.parts)

        reset = torch.cuda.reset_peak_memory_stats if torch.cuda.is_available() else lambda: None
        self.clock = UpdateClock({self.begin: reset, self.end: measured})

    def result(self, log_history: list[dict]) -> dict[str, Any]:
        updates = self.clock.updates
        lengths = {log["completions/mean_length"] for log in log_history if "completions/mean_length" in log}
        if lengths != {self.settings.new_tokens}:
            raise RuntimeError(f"completions of {lengths} tokens instead of {self.settings.new_tokens}")
        return {
            "update_s": statistics.median(updates[self.begin : self.end]),
            "updates_s": updates[self.begin : self.end],
            "processor_s": statistics.median(self.clock.processor[self.begin : self.end]),
            "first_update_s": updates[0],
            "warmup_s": updates[: self.begin],
            "peak_gib": self.peak,
        }


def capture_product(settings: Settings, out: Path, callback_of) -> Any:
    """Runs open_r1/grpo.py as its users do and returns its trainer. `callback_of(trainer)` is added to it."""
    from open_r1 import arguments, grpo

    # Measured beyond the grader's length too.
    arguments.MAX_NEW_TOKENS = max(arguments.MAX_NEW_TOKENS, settings.new_tokens)
    trainers, original = [], grpo.Qwen2VLGRPOTrainer

    class Watched(original):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.add_callback(callback_of(self))
            trainers.append(self)

    grpo.Qwen2VLGRPOTrainer = Watched
    argv, sys.argv = sys.argv, ["grpo.py", *settings.product_flags(out)]
    try:
        grpo.main()
    finally:
        grpo.Qwen2VLGRPOTrainer, sys.argv = original, argv
    return trainers[0]


def measure_product(settings: Settings, out: Path) -> dict[str, Any]:
    measurements = []

    def callback_of(trainer):
        def time_parts(clock: PartsClock) -> None:
            clock.time(trainer.engine, "_prefill", "prefill")
            clock.time(trainer.engine, "_decode", "decode")
            clock.time(trainer, "reward", "rewards")
            clock.time(trainer, "refresh", "refresh")
            clock.time(trainer, "training_step", "update")
            # DeepSpeed clips and steps inside backward(), so inside training_step.
            clock.time(trainer.accelerator, "clip_grad_norm_", "optimizer")
            clock.time(*stepper(trainer), "optimizer")

        measurements.append(Measurement(settings, settings.warmup, time_parts))
        return measurements[0].clock

    trainer = capture_product(settings, out, callback_of)
    measurement = measurements[0]
    result = measurement.result(trainer.state.log_history)
    result["prompt_tokens"] = trainer.encoder.encode(trainer.train_dataset, 0).input_ids.numel()
    gaps = [log["logps_gap"] for log in trainer.state.log_history if "logps_gap" in log]
    result["logps_gap"] = statistics.median(gaps)  # between the rollout's log-probs and the update's
    if settings.parts_steps:
        seconds = measurement.parts.seconds
        per_update = {part: seconds[part] / settings.parts_steps for part in PARTS}
        timed = sum(measurement.clock.updates[measurement.end :]) / settings.parts_steps
        result["parts_s"] = per_update | {"other": timed - sum(per_update.values())}
        result["parts_update_s"] = timed
        result["decode_step_s"] = per_update["decode"] / max(1, settings.new_tokens - 1)
        result["update_per_prompt_s"] = per_update["update"] / settings.prompts
    return result


def stepper(trainer) -> tuple[Any, str]:
    return (trainer.model_wrapped if trainer.is_deepspeed_enabled else trainer.optimizer), "step"


def measure_trl(settings: Settings, out: Path) -> dict[str, Any]:
    """TRL as its users run it, on the same files; `generate` is its rollout."""
    from datasets import Dataset, concatenate_datasets, load_from_disk
    from trl import GRPOConfig, GRPOTrainer

    from open_r1.processor import load_processor
    from open_r1.protocol import EVAL_TEMPLATE

    rows = load_from_disk(settings.rows)
    texts = [EVAL_TEMPLATE.format(question=question) for question in rows["problem"]]
    prompts = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in texts]})
    data = concatenate_datasets([prompts, rows.select_columns("image")], axis=1)
    processor = load_processor(settings.base)
    names = ("<|image_pad|>", "<|video_pad|>", "<|vision_pad|>")
    args = GRPOConfig(
        **settings.shared(out, updates=1 + settings.steps),
        per_device_train_batch_size=settings.group * settings.trl_prompts_per_batch,
        gradient_accumulation_steps=settings.prompts // settings.trl_prompts_per_batch,
        # device_map: its default would put accelerate's dispatch between the layers.
        model_init_kwargs={"dtype": "bfloat16" if settings.cuda else "float32", "device_map": None},
        generation_kwargs={
            "min_new_tokens": settings.new_tokens,
            # A placeholder that random weights sample would be looked up among the image's features.
            "suppress_tokens": processor.tokenizer.convert_tokens_to_ids(names),
        },
    )
    measurement = Measurement(settings, warmup=1)
    trainer = GRPOTrainer(
        str(settings.base), all_different, args, data, processing_class=processor,
        callbacks=[measurement.clock],
    )  # fmt: skip
    trainer.train()
    result = measurement.result(trainer.state.log_history)
    seen = [log["num_tokens"] for log in trainer.state.log_history if "num_tokens" in log][-1]
    completions = (1 + settings.steps) * settings.prompts * settings.group
    return result | {"prompt_tokens": round(seen / completions) - settings.new_tokens}


def measure_weights(settings: Settings, out: Path) -> dict[str, Any]:
    """What the views of token weights add to an update: every other update goes without them."""
    clocks = []

    class Alternate(UpdateClock):
        def __init__(self, trainer):
            super().__init__({})
            self.trainer, self.weigher = trainer, trainer.weigher
            clocks.append(self)

        def on_step_end(self, args, state, control, **kwargs):
            super().on_step_end(args, state, control, **kwargs)
            self.trainer.weigher = None if len(self.updates) % 2 else self.weigher

    trainer = capture_product(settings, out, Alternate)
    results, first = {}, settings.warmup + settings.warmup % 2
    for name, times in (("update_s", clocks[0].updates), ("processor_s", clocks[0].processor)):
        weighed, plain = (times[first + i :: 2] for i in (0, 1))
        results[name] = {"weighed": statistics.median(weighed), "plain": statistics.median(plain)}
        results[name]["added"] = results[name]["weighed"] / results[name]["plain"] - 1
    logs = [log for log in trainer.state.log_history if "time/views_s" in log][first // 2 :]
    return results | {
        "views_s": statistics.median(log["time/views_s"] for log in logs),
        "scored": min(log["token_weights/scored"] for log in logs),
        "updates": len(logs),
    }


def measure_flat(settings: Settings, out: Path) -> dict[str, Any]:
    """Seconds, memory and compilations of each of `flat` product updates with completions of all lengths."""
    updates = []

    class Record(UpdateClock):
        def on_step_end(self, args, state, control, **kwargs):
            super().on_step_end(args, state, control, **kwargs)
            updates.append({"s": self.updates[-1], "graphs": compiled_graphs(), **memory_gib()})

    trainer = capture_product(settings, out, lambda trainer: Record({}))
    lengths = [log["completions/mean_length"] for log in trainer.state.log_history if "reward" in log]
    return {"updates": [row | {"tokens": n} for row, n in zip(updates, lengths, strict=True)]}


def compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process so far."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


MEASURE = {
    "product": measure_product, "trl": measure_trl, "weights": measure_weights, "flat": measure_flat,
    "selfcheck": measure_selfcheck, "memory": measure_memory,
}  # fmt: skip


def main() -> None:
    side, points, file, results = sys.argv[1], load(sys.argv[2]), Path(sys.argv[3]), []
    if points[0].mode != "none" and not points[0].cuda:
        start_deepspeed_on_cpu()
    for settings in points:
        print(f"--- {side}: {settings}", flush=True)
        with tempfile.TemporaryDirectory() as out:
            try:
                results.append(MEASURE[side](settings, Path(out)))
            except torch.OutOfMemoryError:
                results.append({"error": "out of memory"})
        file.write_text(json.dumps(results))
        gc.collect()
        if settings.cuda:
            torch.cuda.empty_cache()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
