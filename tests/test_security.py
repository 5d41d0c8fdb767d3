"""Nothing of a data set or a checkpoint is run, nobody outside is asked, no shell reads what users name."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from open_r1 import network
from open_r1.complete import COMPLETE, mark_complete
from open_r1.pickles import pickle_stages_by_value, refuse_code
from open_r1.rewards import resolve_rewards
from tests.bad_inputs import jsonl
from tests.test_grpo import flags, folder, run  # noqa: F401 (folder is a fixture)
from tests.test_scripts import Box

ROOT = Path(__file__).resolve().parent.parent

# --- The network ------------------------------------------------------------------------------------------

GUARD = """
import atexit, os, runpy, socket, sys

LOCAL = (None, "", "localhost", "127.0.0.1", "::1", socket.gethostname())
asked, connect, lookup = [], socket.socket.connect, socket.getaddrinfo

def guarded_connect(self, address):
    if self.family != socket.AF_UNIX and address[0] not in LOCAL:
        asked.append(address[0])
        raise OSError("blocked by the test")
    return connect(self, address)

def guarded_lookup(host, *args, **kwargs):
    if host not in LOCAL:
        asked.append(host)
        raise socket.gaierror("blocked by the test")
    return lookup(host, *args, **kwargs)

socket.socket.connect, socket.getaddrinfo = guarded_connect, guarded_lookup
socket.socket.connect_ex = guarded_connect
"""
RUN_SCRIPT = """
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
import time; time.sleep(1)  # reports are sent by threads
assert not asked, asked
"""
LOOK_UP = """
import time
time.sleep = lambda seconds: None  # the libraries try again after a while
sys.path.insert(0, sys.argv[1])
from open_r1 import network
from open_r1.checkpoint import local_model
from open_r1.data import DataError, load_rows
from transformers import AutoTokenizer

def show(action, kind):
    asked.clear()
    try:
        action()
        print("it came")
    except kind:
        print(*set(asked))

def show_all():
    show(lambda: local_model("owner/name"), ValueError)
    show(lambda: load_rows("owner/name"), DataError)
    show(lambda: AutoTokenizer.from_pretrained("owner/name"), OSError)

show_all()
network.FORBIDDEN = True  # as HF_HUB_OFFLINE=1 of the user's sets it
show_all()
"""


def guarded(tmp_path: Path, script: str, *arguments, **env) -> subprocess.CompletedProcess:
    """Runs it in a process of its own that can reach nobody."""
    file = tmp_path / "guarded.py"
    file.write_text(GUARD + script)
    unset = ("CI", "HF_HUB_DISABLE_TELEMETRY", *network.OFFLINE)
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    return subprocess.run(
        [sys.executable, str(file), *map(str, arguments)], cwd=ROOT, capture_output=True, text=True,
        env={**kept, "HF_HOME": str(tmp_path / "hub"), **env}, timeout=200,
    )  # fmt: skip


@pytest.mark.parametrize("script", ["grpo.py", "sft.py"])
def test_a_run_asks_nobody(script, folder, tmp_path):  # noqa: F811
    """No address outside this machine, by the libraries or by TRL's SFTTrainer."""
    out = tmp_path / "out"
    arguments = {
        "grpo.py": flags(folder, out, "--max_steps", 1, "--save_strategy", "no"),
        "sft.py": [
            "--model_name_or_path", folder / "base", "--dataset_name", folder / "train", "--output_dir", out,
            "--completion_column", "solution", "--max_steps", 1, "--use_cpu", "true",
            "--per_device_train_batch_size", 2,
        ],
    }[script]  # fmt: skip
    done = guarded(tmp_path, RUN_SCRIPT, ROOT / "open_r1" / script, *arguments)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_only_a_name_of_the_command_line_is_looked_up(tmp_path):
    """Not a tokenizer's by the way; and not even that when the user says HF_HUB_OFFLINE=1."""
    done = guarded(tmp_path, LOOK_UP, ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.splitlines()[-6:] == ["huggingface.co", "huggingface.co", "", "", "", ""]


# --- Pickles ----------------------------------------------------------------------------------------------


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch '{self.path}'",)


def test_a_checkpoint_that_holds_code_is_not_resumed(folder, tmp_path):  # noqa: F811
    out, ran = tmp_path / "out", tmp_path / "ran"
    more = ("--max_steps", 1, "--save_steps", 1)
    run(folder, out, *more)
    checkpoint = out / "checkpoint-1"
    refuse_code(checkpoint)  # our own is let through: it is resumed below
    optimizer = (checkpoint / "optimizer.pt").read_bytes()
    for name in ("optimizer.pt", "rng_state.pth", "global_step1/zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        file = checkpoint / name
        before = file.read_bytes() if file.exists() else None
        file.parent.mkdir(exist_ok=True)
        torch.save({"state": Evil(ran)}, file)
        remark(checkpoint)
        with pytest.raises(ValueError, match=f"{name} would call posix.system when it is loaded"):
            run(folder, out, "--max_steps", 2, "--save_steps", 1)
        file.write_bytes(before or optimizer)
    (checkpoint / "scheduler.pt").write_bytes(pickle.dumps(Evil(ran)))
    with pytest.raises(ValueError, match="scheduler.pt cannot be looked into"):
        refuse_code(checkpoint)
    assert not ran.exists()
    torch.save(Evil(ran), out / "evil.pt")
    torch.load(out / "evil.pt", weights_only=False)
    assert ran.exists()  # so it would have


def test_what_deepspeed_saves_is_let_through_on_every_python(tmp_path, monkeypatch):
    """Python 3.11.2, which Debian 12 has, pickles an enum's member as a call of getattr."""

    def by_name(member, protocol):
        return getattr, (type(member), member.name)

    monkeypatch.setattr(ZeroStageEnum, "__reduce_ex__", by_name)
    torch.save({"stage": ZeroStageEnum.weights}, tmp_path / "states.pt")
    with pytest.raises(ValueError, match="would call builtins.getattr"):
        refuse_code(tmp_path)
    pickle_stages_by_value()
    torch.save({"stage": ZeroStageEnum.weights}, tmp_path / "states.pt")
    refuse_code(tmp_path)
    assert torch.load(tmp_path / "states.pt", weights_only=False)["stage"] is ZeroStageEnum.weights


def remark(checkpoint: Path) -> None:
    """As whoever made the files would mark them."""
    info = json.loads((checkpoint / COMPLETE).read_bytes())
    info.pop("files")
    mark_complete(checkpoint, info)


# --- Names ------------------------------------------------------------------------------------------------


def test_rewards_are_named_on_the_command_line_only(folder, tmp_path, capsys):  # noqa: F811
    """A column or a configuration that names a function has no say."""
    (tmp_path / "train").mkdir()
    row = {"image": "a.png", "problem": "How many?", "solution": 1, "reward_funcs": "os.system"}
    jsonl(tmp_path / "train", *[row] * 4)
    config = json.loads((folder / "base/config.json").read_text())
    base = tmp_path / "base"
    base.mkdir()
    for file in (folder / "base").iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    (base / "config.json").write_text(json.dumps(config | {"reward_funcs": ["os.system"]}))
    trainer = run(tmp_path, tmp_path / "out", "--max_steps", 1, "--save_strategy", "no")
    assert [reward.name for reward in trainer.rewards.rewards] == ["tests.rewards.letters", "accuracy"]


FLAGS = {
    "MODEL": "--model_name_or_path",
    "DATA": "--dataset_name",
    "VAL": "--val_dataset",
    "OOD_VAL": "--ood_val_dataset",
    "OUT": "--output_dir",
    "SUBMISSION": "--submission_dir",
}
ODD = [
    "two words",
    'it\'s "quoted"',
    "$(touch pwned)",
    "`touch pwned`",
    "a;touch pwned",
    "a&&touch pwned|x>pwned",
    "*?[a-z]{1,2}",
    "~ $HOME ${PATH} !!",
    "back\\slash\\n",
    "new\nline",
    "-rf",
    "Würfel 🧊",
]


@pytest.mark.parametrize("how", ["environment", "flags"])
def test_train_sh_hands_odd_names_on_as_they_are(how, tmp_path):
    box = Box(tmp_path)
    for number, odd in enumerate(ODD):
        where = {name: tmp_path / f"{number}" / f"{odd}{i}" for i, name in enumerate(FLAGS)}
        for path in where.values():
            path.mkdir(parents=True)
        if how == "environment":
            done = box.run(**where)
        else:
            done = box.run(*[part for name, path in where.items() for part in (FLAGS[name], str(path))])
        assert done.returncode == 0, done.stderr
        record = box.log.read_text()
        for path in where.values():
            assert f"\x1f{path}\x1f" in record or f"\x1f{path}\n" in record, (odd, record)
        assert not list(tmp_path.rglob("pwned"))


def test_a_dotted_path_is_imported_and_not_evaluated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("os.system('touch pwned').x", "__import__('os').system", "a;import os.b", "..x", "os."):
        with pytest.raises(ValueError, match="--reward_funcs"):
            resolve_rewards([name], None, {})
    assert not list(tmp_path.iterdir())
