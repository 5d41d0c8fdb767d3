"""Out of memory: a rollout goes on in parts, an update is started again with smaller rows."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from open_r1 import rollout, status
from open_r1.complete import complete_marker
from open_r1.rollout import FastEngine
from open_r1.sampling import Sampling, sampling_keys
from tests.prompts import make_prompts
from tests.test_control_processes import Run, none_goes_on, train_sh  # noqa: F401 (a fixture)
from tests.test_distributed import folder  # noqa: F401 (a fixture)
from tests.test_grpo import lines
from tests.tiny import tiny_model, tiny_processor

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def prompts():
    return make_prompts()


def engine(penalty: float = 1.0) -> FastEngine:
    model = tiny_model()
    model.generation_config.repetition_penalty = penalty
    return FastEngine(model, tiny_processor())


def same(a: list[list], b: list[list]) -> None:
    for group, others in zip(a, b, strict=True):
        for one, other in zip(group, others, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist() and one.text == other.text
            # products of other sizes round differently
            assert torch.allclose(one.logps, other.logps, atol=1e-5)


@pytest.mark.parametrize("room", [1, 2, 7])
def test_a_rollout_that_finds_no_room_goes_on_in_parts(prompts, room, monkeypatch, capsys):
    """`room` rows fit: groups are cut between prompts, then within one."""
    sampling, keys = Sampling(False, 12), sampling_keys(3, 1, range(3), 3)
    expected = engine().generate(prompts[:3], 3, sampling, keys)
    greedy = Sampling(greedy=True, max_new_tokens=12)
    expected_greedy = engine(1.3).generate(prompts, 1, greedy)
    made = []

    class Small(rollout.DecodeBatch):
        def __init__(self, model, rows, *shape):
            made.append(rows)
            if rows > room:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            super().__init__(model, rows, *shape)

    monkeypatch.setattr(rollout, "DecodeBatch", Small)
    small = engine()
    same(small.generate(prompts[:3], 3, sampling, keys), expected)
    assert small.splits >= 1 and max(made) == 9
    assert "A rollout of 9 completions found no room on cpu: it is cut in two" in capsys.readouterr().out
    made.clear()
    same(small.generate(prompts[:3], 3, sampling, keys), expected)
    assert max(made, default=0) <= room  # what found no room is not tried again
    same(engine(1.3).generate(prompts, 1, greedy), expected_greedy)


def test_one_row_without_room_is_an_error(prompts, monkeypatch):
    def refuse(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(rollout, "DecodeBatch", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        engine().generate(prompts[:1], 2, Sampling(greedy=True, max_new_tokens=4))


def test_which_flags_come_next(tmp_path):
    ways = [["--prompts_per_row", "2"], ["--gradient_checkpointing", "true"]]
    path = tmp_path / "status.json"
    assert status.smaller(tmp_path, 0, 1) == []
    for given, expected in ((ways, ways), (ways[:1], [ways[0], ways[0]]), ([], [[], []])):
        status.write_status(path, status.OUT_OF_MEMORY, "m", status.NO_MEMORY, smaller=given)
        assert [status.smaller(tmp_path, 0, attempt) for attempt in (1, 2)] == expected
    assert status.smaller(tmp_path, time.time() + 10, 1) == []  # of an earlier run
    status.write_status(path, "failed", "m", 1)
    assert status.smaller(tmp_path, 0, 1) == []


def test_train_sh_goes_on_with_smaller_rows(folder):  # noqa: F811
    """The second update of two prompts a row finds no room, nor does it with one prompt; with gradient
    checkpointing too it does. The update stays the same prompts, and the run the same run."""
    run = train_sh(
        folder, "small", "--prompts_per_row", "2", "--max_steps", "2", "--save_steps", "1",
        "--max_hours", "9", "--num_generations", "2", "--reward_weights", "1",
        "--reward_funcs", "tests.small_memory.letters", "--finalize", "false",
    )  # fmt: skip
    code, found = run.end(timeout=400)
    shown = run.log.read_text()
    assert (code, found["cause"]) == (0, "finished"), shown[-6000:]
    again = [line for line in shown.splitlines() if line.startswith("train.sh: no memory was left")]
    rows = "--prompts_per_row 1 --gradient_accumulation_steps 16 --steps_per_generation 16"
    assert len(again) == 2 and f"attempt 1 of at most 2: {rows} --max_hours 8.9" in again[0]
    assert "--gradient_checkpointing true" in again[1]
    assert "grpo.py: Rank 0 had no memory left: CUDA out of memory. Tried to allocate 2.00 GiB. Set" in shown
    assert "grpo.py: Rank 0 had no memory left: Triton Error [CUDA]: out of memory. Set" in shown
    assert shown.count("goes on from ") >= 2 and "--prompts_per_row 2 -> 1" in shown
    assert [line["step"] for line in lines(run.out / "logs.jsonl") if "loss" in line] == [1, 2]
    names = ("checkpoint-1", "checkpoint-2")
    assert {complete_marker(run.out / name)["run"] for name in names} == {
        json.loads((run.out / "run.json").read_text())["run"]
    }


def test_one_of_two_ranks_without_memory_ends_both(folder):  # noqa: F811
    run = Run(folder, "no_memory", "--max_steps", 1000, "--save_steps", 1, fault="1:3:oom")
    code, found = run.end(timeout=100)
    assert (code, found["cause"], found["rank"]) == (68, "out_of_memory", 1), run.log.read_text()[-6000:]
    assert "exit code 68: Rank 1 had no memory left: CUDA out of memory." in run.last_line()
    assert found["smaller"] == [["--gradient_checkpointing", "true"]]
    assert complete_marker(run.out / "checkpoint-1")


def test_a_rank_that_waits_for_a_failed_one_ends_at_the_signal(tmp_path):
    """In a call that Python's own handler cannot interrupt."""
    script = (
        "import hashlib, sys\n"
        "from pathlib import Path\n"
        "from open_r1.control import RunControl\n"
        "from open_r1.failed_peers import end_with_failed_peers\n"
        "run = RunControl()\n"
        "run.handle_signals()\n"
        "run.began, run.began_at, run.failure_file = True, 0.0, Path(sys.argv[1]) / 'status-rank0.json'\n"
        "end_with_failed_peers(run.peer_failed)\n"
        "print('ready', flush=True)\n"
        "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)  # nobody has failed: the run would stop in order
        time.sleep(0.5)
        assert process.poll() is None
        (tmp_path / "status-rank1.json").write_text("{}")
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 128 + signal.SIGTERM
    finally:
        process.kill()

