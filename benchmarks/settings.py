"""What a measurement is: its settings, and the flags that they become on either side."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROW_TOKENS = 12288  # tokens of a packed row, where --prompts_per_row does not say how many prompts it has

# train.sh's flags that mean the same to both trainers.
RECIPE = {
    "temperature": 1.0, "top_p": 1.0, "scale_rewards": "group", "loss_type": "dapo", "beta": 0.0,
    "learning_rate": 1e-6, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 10,
    "max_grad_norm": 0.5, "logging_steps": 1, "seed": 42,
}  # fmt: skip


@dataclass
class Settings:
    """One measured point."""

    size: str = "tiny"  # tiny | 2b
    device: str = "cpu"  # cpu | cuda
    mode: str = "none"  # none | zero2 | zero3
    new_tokens: int = 128
    prompts: int = 8
    group: int = 8
    width: int = 480
    height: int = 320
    prompts_per_row: int | None = None
    trl_prompts_per_batch: int = 1  # prompts, each with its group, in one of TRL's forward passes
    gradient_checkpointing: bool = False
    steps: int = 5  # measured updates
    warmup: int = 2  # updates before them, the compiling ones among them; TRL, which compiles nothing, has 1
    parts_steps: int = 3  # updates behind them, in which the product's parts are timed
    images: int = 512  # that the self-check's measurement answers
    token_weights: str | None = None  # product updates with and without them in turn
    flat: int = 0  # product updates with completions of different lengths (instead of all the above)
    flags: dict[str, Any] = field(default_factory=dict)  # more of the product's
    folder: str = str(ROOT / "outputs" / "benchmark")  # models and images, kept for the next command

    @property
    def base(self) -> Path:
        return Path(self.folder, f"base-{self.size}")

    @property
    def rows(self) -> Path:
        shape = "mixed" if self.flat else f"{self.width}x{self.height}"
        return Path(self.folder, f"rows-{shape}")

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def image_tokens(self) -> int:
        return round(self.width / 28) * round(self.height / 28)

    def row_prompts(self) -> int:
        """Prompts of a packed row: as asked, or the most that divide the update and stay below ROW_TOKENS."""
        if self.prompts_per_row:
            return self.prompts_per_row
        tokens = self.image_tokens + 200 + self.group * self.new_tokens
        divisors = [n for n in range(1, self.prompts + 1) if self.prompts % n == 0]
        return max((n for n in divisors if n * tokens <= ROW_TOKENS), default=1)

    def deepspeed(self) -> Path | None:
        """The DeepSpeed configuration of both sides, as shipped."""
        return None if self.mode == "none" else ROOT / f"{self.mode}.json"

    def shared(self, out: Path, updates: int) -> dict[str, Any]:
        """Arguments of both trainers, by their common names."""
        more = {
            "output_dir": str(out), "num_generations": self.group, "max_completion_length": self.new_tokens,
            "max_steps": updates, "gradient_checkpointing": self.gradient_checkpointing,
            "bf16": self.cuda, "use_cpu": not self.cuda, "dataloader_num_workers": 2 if self.cuda else 0,
            "save_strategy": "no", "report_to": "none",
        }  # fmt: skip
        if self.mode != "none":
            more["deepspeed"] = str(self.deepspeed())
            if not self.cuda:  # accelerate has no CPU path for DeepSpeed: the state is made beforehand
                more["accelerator_config"] = {"use_configured_state": True}
        return RECIPE | more

    def product_flags(self, out: Path) -> list[str]:
        updates = self.flat or self.warmup + self.steps + self.parts_steps
        if self.token_weights:
            updates = self.warmup + 2 * self.steps
        flags = self.shared(out, updates) | {
            "model_name_or_path": str(self.base), "dataset_name": str(self.rows), "eval_strategy": "no",
            "prompts_per_row": self.row_prompts(), "prompt_mix": 0.0,
            "gradient_accumulation_steps": self.prompts // self.row_prompts(),
            "reward_funcs": "benchmarks.rewards.all_different",
            "check_data": True,  # else a background process decodes images while updates are measured
        }  # fmt: skip
        if self.token_weights:
            flags["token_weights"] = self.token_weights
        flags |= self.flags
        text = {name: json.dumps(v) if isinstance(v, dict) else str(v) for name, v in flags.items()}
        return [part for name, value in text.items() for part in (f"--{name}", value)]

    def refuse(self) -> None:
        """ValueError for numbers that make no update."""
        trl = self.trl_prompts_per_batch
        for name, part in (("prompts_per_row", self.row_prompts()), ("trl_prompts_per_batch", trl)):
            if self.prompts % part:
                raise ValueError(f"--{name} {part} does not divide --prompts {self.prompts}: set another")


def save(points: Sequence[Settings], file: Path) -> None:
    file.write_text(json.dumps([asdict(settings) for settings in points]))


def load(file: str | Path) -> list[Settings]:
    return [Settings(**one) for one in json.loads(Path(file).read_text())]
