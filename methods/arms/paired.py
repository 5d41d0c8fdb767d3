"""Paired comparison of two arms that answered the same rows with the same seeds.

Legend
  S  seeds     R  rows of a test set; correctness is [S, R], 1 or 0
"""

import math
from dataclasses import dataclass

import numpy as np

RESAMPLES, LEVEL = 4000, 95
# Student's t, 97.5 %, by degrees of freedom.
STUDENT = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201]

Interval = tuple[float, float]


@dataclass(frozen=True)
class Comparison:
    """An arm minus its reference, in points of accuracy; the mean over the test sets."""

    effect: float
    by_seed: list[float]
    rows: Interval  # for these very models: rows are drawn again, each with the answers of all seeds
    seeds: Interval | None  # for another seed: Student's t over the seeds' differences; None with one seed
    better: int  # answers, rows x seeds, that only the arm has right
    worse: int  # that only the reference has right
    p: float  # McNemar's exact test, mid-p, of better against worse; rows x seeds count as independent

    @property
    def verdict(self) -> str:
        def side(interval: Interval | None) -> str | None:
            if interval is None or interval[0] <= 0 <= interval[1]:
                return None
            return "better" if interval[0] > 0 else "worse"

        if found := side(self.seeds):
            return found
        if found := side(self.rows):
            return f"{found} with these seeds"
        return "no difference shown"


def compare(arm: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> Comparison:
    """Both {test set: [S, R]}, the same seeds and rows in the same order. The test sets weigh the same."""
    gaps = [np.asarray(arm[name], float) - reference[name] for name in reference]  # each [S, R]
    by_seed = 100 * np.mean([gap.mean(1) for gap in gaps], axis=0)  # [S]
    better, worse = (int(sum((sign * gap > 0).sum() for gap in gaps)) for sign in (1, -1))
    rng = np.random.default_rng(0)
    resampled = np.mean([resampled_means(gap.mean(0), rng) for gap in gaps], axis=0)  # [RESAMPLES]
    tail = (100 - LEVEL) / 2
    low, high = np.percentile(100 * resampled, [tail, 100 - tail])
    return Comparison(
        float(by_seed.mean()), by_seed.tolist(), (float(low), float(high)), seed_interval(by_seed.tolist()),
        better, worse, mcnemar(better, worse),
    )  # fmt: skip


def resampled_means(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Means of RESAMPLES samples with replacement of `values` [R]."""
    return values[rng.integers(len(values), size=(RESAMPLES, len(values)))].mean(1)


def seed_interval(differences: list[float]) -> Interval | None:
    """Student's t interval of the mean; None of a single one."""
    n = len(differences)
    if n < 2:
        return None
    mean = sum(differences) / n
    variance = sum((d - mean) ** 2 for d in differences) / (n - 1)
    half = STUDENT[min(n - 1, len(STUDENT)) - 1] * math.sqrt(variance / n)
    return mean - half, mean + half


def mcnemar(better: int, worse: int) -> float:
    """Two-sided p of McNemar's exact test with the mid-p correction (Fagerland and others, 2013): the
    discordant pairs as fair coins, half of the observed outcome's own probability left out."""
    n, k = better + worse, min(better, worse)
    if n == 0:
        return 1.0
    below = sum(math.comb(n, i) for i in range(k))
    own = math.comb(n, k)
    return min(1.0, (2 * below + own) / 2**n) if better != worse else 1.0 - own / 2 ** (n + 1)
