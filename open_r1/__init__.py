"""GRPO for vision-language models, as plain scripts."""

import os

from open_r1.network import stay_offline

stay_offline()
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
