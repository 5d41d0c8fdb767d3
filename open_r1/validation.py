"""Greedy accuracy under the grader's protocol: prompts -> answers -> statistics -> a table.

Validation in training and selfcheck.py both run this code, so their numbers mean the same thing: the grader's
prompt, greedy decoding, at most 256 new tokens, the grader's answer rule and integer equality. Nothing here
reads weights or writes files.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

from open_r1.data_loader import prompt_loader
from open_r1.protocol import EVAL_TEMPLATE, MAX_NEW_TOKENS, extract_answer
from open_r1.sampling import Sampling

GREEDY = Sampling(greedy=True, max_new_tokens=MAX_NEW_TOKENS)


@dataclass(frozen=True)
class Example:
    """One validated row; a line of the self-check's JSONL is one of these."""

    row: int  # index in the data set
    question: str
    answer: int  # the true count
    prediction: int | None  # what the grader reads; None when it finds no answer
    correct: bool
    truncated: bool  # no end of sequence within MAX_NEW_TOKENS
    num_tokens: int  # of the completion, end of sequence included
    text: str


class _GraderPrompts:
    """Encodes with the grader's prompt, whatever mix of phrasings the encoder has for training."""

    def __init__(self, encoder):
        self.encoder = encoder

    def encode(self, data, row: int, step: int):
        return self.encoder.encode(data, row, EVAL_TEMPLATE)


def pick_rows(total: int, limit: int | None) -> list[int]:
    """All rows, or `limit` of them, evenly spaced: data sets are often sorted, by count say."""
    count = total if limit is None else min(limit, total)
    return [i * total // count for i in range(count)]


def evaluate(
    engine,
    encoder,
    data,
    *,
    rows: Sequence[int] | None = None,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 2,
    progress: bool = True,
    name: str = "validation",
    interrupted: Callable[[], bool] | None = None,
) -> list[Example]:
    """Answer this rank's share of `rows` (default: all rows of `data`) as the grader would.

    Each rank takes every `world_size`-th row; `gather_examples` puts the shares together. `num_workers`
    processes encode the next batches while the model generates. Rank 0 shows a progress bar with its accuracy
    so far. Once `interrupted()` it stops, with examples missing. Raises DataError for a row that cannot be
    encoded.
    """
    share = list(range(len(data)) if rows is None else rows)[rank::world_size]
    examples: list[Example] = []
    with tqdm(total=len(share), desc=name, unit="row", disable=not progress or rank > 0) as bar:
        for prompts in prompt_loader(
            data,
            _GraderPrompts(encoder),
            lambda number: share[number * batch_size : (number + 1) * batch_size],
            start=0,
            stop=-(-len(share) // batch_size),
            num_workers=num_workers,
        ):
            groups = engine.generate(prompts, 1, GREEDY, None, interrupted)
            if interrupted and interrupted():
                break
            examples += [_grade(prompt, group[0]) for prompt, group in zip(prompts, groups, strict=True)]
            bar.set_postfix_str(f"accuracy {100 * sum(e.correct for e in examples) / len(examples):.1f} %")
            bar.update(len(prompts))
    return examples


def _grade(prompt, completion) -> Example:
    prediction = extract_answer(completion.text)
    return Example(
        row=prompt.row,
        question=prompt.columns["question"],
        answer=prompt.columns["answer"],
        prediction=prediction,
        correct=prediction == prompt.columns["answer"],
        truncated=completion.truncated,
        num_tokens=len(completion.token_ids),
        text=completion.text,
    )


def gather_examples(examples: list[Example]) -> list[Example]:
    """The examples of all ranks, on every rank, sorted by row (one process: its own)."""
    shares = [examples]
    if dist.is_initialized():
        shares = [None] * dist.get_world_size()
        dist.all_gather_object(shares, examples)
    return sorted((example for share in shares for example in share), key=lambda example: example.row)


# --- Statistics


def summarize(examples: Sequence[Example]) -> dict[str, Any]:
    """Statistics of one data set, ready for JSON. Raises ValueError when there are no examples."""
    if not examples:
        raise ValueError("There are no rows to summarize: give at least one row of the data set.")
    total, correct = len(examples), sum(e.correct for e in examples)
    unparsed = sum(e.prediction is None for e in examples)
    share = correct / total
    seen, right = Counter(e.answer for e in examples), Counter(e.answer for e in examples if e.correct)
    errors = Counter(e.prediction - e.answer for e in examples if e.prediction is not None and not e.correct)
    return {
        "accuracy_pct": 100 * correct / total,
        "standard_error": 100 * math.sqrt(share * (1 - share) / total),  # of accuracy_pct, in points
        "correct": correct,
        "total": total,
        "parsed_pct": 100 * (total - unparsed) / total,
        "truncated_pct": 100 * sum(e.truncated for e in examples) / total,
        "mean_tokens": sum(e.num_tokens for e in examples) / total,
        "unparsed": unparsed,
        # {true count: (correct, total)}
        "per_count": {count: (right[count], seen[count]) for count in sorted(seen)},
        # {prediction - truth: number of rows}, without the unparsed
        "errors": dict(sorted(errors.items())),
    }


def score(summaries: Iterable[dict[str, Any]]) -> float:
    """The grader's score: the mean of accuracy_pct over the data sets."""
    accuracies = [summary["accuracy_pct"] for summary in summaries]
    return sum(accuracies) / len(accuracies)


# --- The table

BAR = 12  # characters of a full bar
COLUMN = BAR + 20  # characters of one data set's column
FAR = 4  # errors of this size and beyond share a line


def format_table(summaries: dict[str, dict[str, Any]]) -> str:
    """A terminal table of {name: summarize(...)}: a line per set, accuracy per true count, wrong answers."""
    if not summaries:
        return "No data set was scored."
    width = max(8, *map(len, summaries))
    lines = [f"{'':{width}}  {'accuracy':>17} {'parsed':>9} {'truncated':>10} {'tokens':>7} {'rows':>7}"]
    for name, s in summaries.items():
        accuracy = f"{s['accuracy_pct']:.2f} ± {s['standard_error']:.2f} %"
        shares = f"{s['parsed_pct']:7.1f} % {s['truncated_pct']:8.1f} % {s['mean_tokens']:7.1f}"
        lines.append(f"{name:{width}}  {accuracy:>17} {shares} {s['total']:7}")
    # The sets are independent samples, so the variances of their means add.
    error = math.hypot(*(s["standard_error"] for s in summaries.values())) / len(summaries)
    mean = f"{score(summaries.values()):.2f} ± {error:.2f} %"
    lines.append(f"{'score':{width}}  {mean:>17}")

    lines += ["", *_per_count(summaries), "", *_errors(summaries)]
    return "\n".join(line.rstrip() for line in lines)


def _header(title: str, names: Iterable[str]) -> str:
    return f"{title:>10}  " + "".join(f"{name[: COLUMN - 2]:<{COLUMN}}" for name in names)


def _per_count(summaries: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["Accuracy by true count", _header("count", summaries)]
    for count in sorted({count for s in summaries.values() for count in s["per_count"]}):
        cells = []
        for s in summaries.values():
            correct, total = s["per_count"].get(count, (0, 0))
            share = correct / total if total else 0
            cells.append(f"{_bar(share)} {100 * share:5.1f} %  of {total}" if total else f"{'':{BAR}}     -")
        lines.append(f"{count:>10}  " + "".join(f"{cell:<{COLUMN}}" for cell in cells))
    return lines


def _errors(summaries: dict[str, dict[str, Any]]) -> list[str]:
    """Bars of wrong answers by prediction - truth, each set scaled to its own longest bar."""
    columns = []
    for s in summaries.values():
        column = Counter({"no answer": s["unparsed"]})
        for error, number in s["errors"].items():
            column[max(-FAR, min(FAR, error))] += number
        columns.append(column)
    near = [error for error in range(-FAR, FAR + 1) if error]
    names = {error: f"{error:+d}" for error in near} | {-FAR: f"{-FAR} or less", FAR: f"+{FAR} or more"}
    lines = ["Wrong answers by prediction - truth", _header("error", summaries)]
    for error in [*near, "no answer"]:
        cells = []
        for s, column in zip(summaries.values(), columns, strict=True):
            bar = _bar(column[error] / max(1, *column.values()))
            cells.append(f"{bar} {column[error]:5} {100 * column[error] / s['total']:6.1f} %")
        lines.append(f"{names.get(error, error):>10}  " + "".join(f"{cell:<{COLUMN}}" for cell in cells))
    return lines


def _bar(share: float) -> str:
    """A bar of BAR characters in eighths; what is not zero shows."""
    eighths = min(8 * BAR, max(round(8 * BAR * share), 1 if share else 0))
    bar = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
    return f"{bar:<{BAR}}"
