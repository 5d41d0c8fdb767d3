"""validation.py: the grader's rule row by row, hand-worked statistics, shares of ranks, the table."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from open_r1.data import Prompt
from open_r1.protocol import EVAL_TEMPLATE, MAX_NEW_TOKENS
from open_r1.rollout import Completion
from open_r1.validation import Example, evaluate, format_table, gather_examples, pick_rows, score, summarize


class FakeEncoder:
    """Row i asks for the count data[i][0], and the fake engine answers with the text data[i][1]."""

    def encode(self, data, row, template):
        answer, text = data[row]
        columns = {"question": f"Question {row}?", "answer": answer, "text": text, "template": template}
        ids = torch.tensor([row, len(text)])
        return Prompt(
            row,
            ids,
            ids.expand(3, 2),
            2,
            torch.full((4, 6), float(row)),
            torch.tensor([[1, 2, 2]]),
            columns,
            None,
        )


class FakeEngine:
    def __init__(self):
        self.calls = []

    def generate(self, prompts, num_generations, sampling, keys, interrupted):
        self.calls.append(SimpleNamespace(prompts=prompts, sampling=sampling))
        assert num_generations == 1 and keys is None
        assert all(torch.equal(p.pixel_values, torch.full((4, 6), float(p.row))) for p in prompts)
        return [[completion(prompt.columns["text"])] for prompt in prompts]


def completion(text: str) -> Completion:
    ids = torch.arange(len(text))
    return Completion(ids, torch.zeros(len(text)), truncated="</answer>" not in text, text=text)


def run(data, **options):
    options = {"batch_size": 4, "num_workers": 0, "progress": False} | options
    return evaluate(options.pop("engine", FakeEngine()), FakeEncoder(), data, **options)


def example(row: int, answer: int, prediction: int | None, tokens: int = 8, truncated=False) -> Example:
    return Example(row, "How many?", answer, prediction, prediction == answer, truncated, tokens, "")


# (completion, true count, what the grader reads); the true count is always what a lenient reader would see
PROTOCOL = [
    ("<think> two and one </think> <answer> 3 </answer>", 3, 3),
    ("<answer>3</answer>", 3, 3),
    ("<answer>\n3\n</answer>", 3, 3),
    ("<answer>03</answer>", 3, 3),
    ("<answer>5 items</answer>", 5, None),
    ("<answer>five</answer>", 5, None),
    ("<answer>-5</answer>", 5, None),
    ("<answer>5.0</answer>", 5, None),
    ("<answer>5", 5, None),
    ("<Answer>5</Answer>", 5, None),
    ("There are 5 items.", 5, None),
    ("", 5, None),
    ("<answer>4 items</answer> <answer>5</answer>", 5, 5),  # the first well-formed block
    ("<answer>4</answer> <answer>5</answer>", 5, 4),
    ("<answer><answer>5</answer>", 5, 5),
    ("<answer>５</answer>", 5, 5),  # Python's \d and int() take the digits of every script
    ("<answer>٥</answer>", 5, 5),
    ("<answer>²</answer>", 2, None),  # a superscript is no digit to either
]


def test_rows_are_graded_by_the_protocol():
    engine = FakeEngine()
    examples = run([(answer, text) for text, answer, _ in PROTOCOL], engine=engine)
    assert [e.prediction for e in examples] == [prediction for _, _, prediction in PROTOCOL]
    assert [e.correct for e in examples] == [prediction == answer for _, answer, prediction in PROTOCOL]
    assert [e.text for e in examples] == [text for text, _, _ in PROTOCOL]
    assert examples[4] == Example(4, "Question 4?", 5, None, False, False, 24, "<answer>5 items</answer>")
    assert examples[10].truncated
    assert {call.sampling.greedy for call in engine.calls} == {True}
    assert {call.sampling.max_new_tokens for call in engine.calls} == {MAX_NEW_TOKENS} == {256}
    assert {prompt.columns["template"] for call in engine.calls for prompt in call.prompts} == {EVAL_TEMPLATE}


DATA = [(i % 7, f"<answer>{i % 5}</answer>") for i in range(23)]


def test_batches_keep_the_order_and_cover_the_rows_asked_for():
    engine = FakeEngine()
    examples = run(DATA, engine=engine, rows=[20, 3, 11, 4, 0], batch_size=2)
    assert [e.row for e in examples] == [20, 3, 11, 4, 0]
    assert [len(call.prompts) for call in engine.calls] == [2, 2, 1]
    assert [e.row for e in gather_examples(examples)] == [0, 3, 4, 11, 20]


def test_workers_give_the_same_examples_and_leave_the_random_state_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert run(DATA, num_workers=2) == run(DATA)
    assert torch.equal(torch.get_rng_state(), before)


def _rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    examples = gather_examples(run(DATA, rank=rank, world_size=2))
    torch.save([vars(e) for e in examples], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_find_what_one_finds(tmp_path):
    mp.start_processes(_rank, (str(tmp_path),), nprocs=2, start_method="fork")
    alone = [vars(e) for e in run(DATA)]
    assert torch.load(tmp_path / "0.pt") == torch.load(tmp_path / "1.pt") == alone


@pytest.mark.parametrize("rows", [[5], [1, 2, 3, 4, 5]])
def test_shares_of_ranks_split_the_rows(rows):
    shares = [run(DATA, rows=rows, rank=rank, world_size=2) for rank in range(2)]
    assert [len(share) for share in shares] == [math.ceil(len(rows) / 2), len(rows) // 2]
    assert sorted(e.row for share in shares for e in share) == rows


def test_statistics_worked_by_hand():
    s = summarize([
        example(0, 3, 3, tokens=10),
        example(1, 3, 2, tokens=20),
        example(2, 7, 5, tokens=10),
        example(3, 7, None, tokens=256, truncated=True),
        example(4, 7, 7, tokens=9),
        example(5, 3, 3, tokens=10),
        example(6, 4, 6, tokens=11),
        example(7, 3, 2, tokens=2),
    ])  # fmt: skip
    assert (s["accuracy_pct"], s["correct"], s["total"]) == (37.5, 3, 8)
    assert s["standard_error"] == pytest.approx(17.11633)  # 100 * sqrt(3/8 * 5/8 / 8)
    assert (s["parsed_pct"], s["unparsed"], s["truncated_pct"], s["mean_tokens"]) == (87.5, 1, 12.5, 41.0)
    assert s["per_count"] == {3: (2, 4), 4: (0, 1), 7: (1, 3)}
    assert s["errors"] == {-2: 1, -1: 2, 2: 1}
    assert s["correct"] + s["unparsed"] + sum(s["errors"].values()) == s["total"]


def test_the_score_is_the_mean_over_sets_not_over_rows():
    small = summarize([example(0, 3, 3)])
    large = summarize([example(i, 3, 2) for i in range(9)])
    assert score([small, large]) == 50.0
    assert score({"val": small, "ood_val": large}.values()) == 50.0


def test_an_empty_set_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match="no rows to summarize"):
        summarize([])


def test_the_table():
    val = [example(i, 3, 3) for i in range(6)] + [example(6, 5, 4), example(7, 5, None)]
    ood = [example(0, 12, 2), example(1, 12, 12), example(2, 12, 11), example(3, 12, 11)]
    table = format_table({"val": summarize(val), "ood_val": summarize(ood)})
    lines = table.splitlines()
    assert lines == [line.rstrip() for line in lines] and max(map(len, lines)) <= 80
    find = {line.split()[0]: line for line in lines if line}
    assert "75.00 ± 15.31 %" in find["val"] and "87.5 %" in find["val"]
    assert "25.00 ± 21.65 %" in find["ood_val"]
    assert "50.00 ± 13.26 %" in find["score"]  # sqrt(15.31^2 + 21.65^2) / 2
    assert find["3"].split() == ["3", "█" * 12, "100.0", "%", "of", "6", "-"]
    assert find["12"].split() == ["12", "-", "███", "25.0", "%", "of", "4"]
    # bars are scaled to the set's own longest one; far errors share a line; the unparsed have their own
    assert find["-1"].split() == ["-1", "█" * 12, "1", "12.5", "%", "█" * 12, "2", "50.0", "%"]
    assert find["-4"].split() == ["-4", "or", "less", "0", "0.0", "%", "██████", "1", "25.0", "%"]
    assert find["no"].split() == ["no", "answer", "█" * 12, "1", "12.5", "%", "0", "0.0", "%"]
    # one of 300 still shows
    many = [example(i, 3, 2) for i in range(300)] + [example(300, 3, 4)]
    (line,) = [
        line for line in format_table({"val": summarize(many)}).splitlines() if line.strip().startswith("+1")
    ]
    assert line.split()[1:3] == ["▏", "1"]
    assert format_table({}) == "No data set was scored."


def test_limited_rows_are_spread_over_the_set():
    assert pick_rows(10, 4) == [0, 2, 5, 7]
    assert pick_rows(3, 4) == pick_rows(3, None) == [0, 1, 2]
