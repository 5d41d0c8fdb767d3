"""What accuracy does not show: the distance to the base, how much hangs on the image, what numerals stand
for.

Each is measured afterwards, from a model's folder, so it depends neither on what a run logs nor on the
method.

Legend
  N  tokens of all sampled completions
"""

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from open_r1 import validation
from open_r1.data import CountingData, Prompt
from open_r1.kl_readout import token_numbers
from open_r1.packing import pack
from open_r1.probe import BlankImages
from open_r1.rollout import FastEngine
from open_r1.sampling import Sampling, sampling_keys

# --- KL to the base


def kl_readout(logps: Tensor, base_logps: Tensor) -> dict[str, float]:
    """Estimates of KL(policy || base) a token, in nats, on completions that the policy sampled; both [N].

    As a run logs them with --kl_readout_steps.
    """
    k3, k1, far = token_numbers(logps, base_logps).mean(1).tolist()
    return {"k1": k1, "k3": k3, "far": far}


@torch.no_grad()
def kl_to_base(
    engine: FastEngine, score_base: Callable, prompts: Sequence[Prompt], *, completions: int, new_tokens: int
) -> dict[str, float]:
    """kl_readout on `completions` samples of each prompt at temperature 1, the same noise for every model.

    `score_base` is the base after open_r1.scoring.add_scoring_forward.
    """
    sampling = Sampling(greedy=False, max_new_tokens=new_tokens)
    keys = sampling_keys(0, 0, range(len(prompts)), completions)
    groups = engine.generate(prompts, completions, sampling, keys)
    own, base = [], []
    for prompt, group in zip(prompts, groups, strict=True):
        row = pack([(prompt, [c.token_ids for c in group])])
        base.append(score_base(**row.to(engine.device).model_inputs()).float().cpu())
        own += [c.logps for c in group]
    return kl_readout(torch.cat(own), torch.cat(base))


# --- the image


def image_gap(engine: FastEngine, encoder, data: CountingData, rows: Sequence[int], batch_size: int) -> dict:
    """Accuracy in percent on `rows` with their images and with blank ones, and the difference."""

    def accuracy(shown) -> float:
        examples = validation.evaluate(
            engine, shown, data, rows=rows, batch_size=batch_size, num_workers=0, progress=False
        )
        return validation.summarize(examples)["accuracy_pct"]

    right, blank = accuracy(encoder), accuracy(BlankImages(encoder))
    return {"right": right, "blank": blank, "gap": right - blank}


# --- numerals and what they label, in the demo's own words

CELLS = 16  # places of the grid
COUNTED = re.compile(r"(\d+) ([a-d][1-4])\b")


def numbering(texts: Sequence[str], shown: Sequence[str]) -> dict[str, float]:
    """Whether the numerals of written-out counting (`1 a1 2 b3`) label the objects that were asked for.

    `texts` are completions, `shown` the right ones, whose places are those of the objects. In percent:
    `labels_right` of the numerals written, those at an object asked for and not labelled before, and
    `chance` of it, were the places any of the 16 cells;
    `objects_labelled` of the objects asked for; `bound` of the rows, those whose numerals label exactly them;
    `bound_of_correct` likewise of the rows with the right count: what is missing there was right by accident.
    Rows without an object to label are left out.
    """
    written = right = by_chance = objects = bound = correct = bound_and_correct = rows = 0
    for text, gold in zip(texts, shown, strict=True):
        wanted = {place for _, place in COUNTED.findall(gold)}
        if not wanted:
            continue
        said = [place for _, place in COUNTED.findall(text)]
        hit = wanted & set(said)
        exact = sorted(said) == sorted(wanted)
        by_chance += len(said) * len(wanted) / CELLS
        count = validation.extract_answer(text) == len(wanted)
        rows, objects, written, right = rows + 1, objects + len(wanted), written + len(said), right + len(hit)
        bound, correct, bound_and_correct = (
            bound + exact,
            correct + count,
            bound_and_correct + (exact and count),
        )

    def percent(part: float, whole: int) -> float | None:
        return 100 * part / whole if whole else None

    return {
        "labels_right": percent(right, written), "chance": percent(by_chance, written),
        "objects_labelled": percent(right, objects),
        "bound": percent(bound, rows), "bound_of_correct": percent(bound_and_correct, correct),
    }  # fmt: skip
