"""GRPO for vision-language models, as plain scripts."""

import os

# Set before any Hugging Face library is imported: a training run reports to nobody unless its user says so.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
