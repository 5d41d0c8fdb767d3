"""The shell scripts, run for real with stand-ins for Python and the demo, and the version check they rely on.

The stand-in records every call, answers what the scripts ask (packages there? how many GPUs?) as the STUB_
variables say, and trains nothing. The scripts run from a copy in which /app is a folder of the test.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from importlib import metadata
from pathlib import Path

import pytest

from open_r1 import versions

ROOT = Path(__file__).resolve().parent.parent
METHODS = {  # the first flag of each, and its value
    "ttrl": ("--reward_funcs", "majority_vote"),
    "intuitor": ("--reward_funcs", "self_certainty"),
    "rent": ("--reward_funcs", "negative_entropy"),
    "prpo": ("--token_weights", "prpo"),
    "vppo": ("--token_weights", "vppo"),
}
SEPARATOR = "\x1f"  # between the arguments of a recorded call

PYTHON = r"""#!/usr/bin/env bash
me=$0
record=$me
for argument in "$@"; do record+=$'\x1f'$argument; done
echo "$record" >>"$STUB_LOG"
case "$*" in
    *versions.py*)
        if [[ $me == */.venv/* ]]; then
            [[ -e $(dirname "$me")/installed ]] || exit 3
        elif [[ ${STUB_SYSTEM:-complete} == missing ]]; then
            echo "torch>=2.11,<2.15"; exit 3
        elif [[ ${STUB_SYSTEM:-complete} == outside ]]; then
            echo "trl is too old" >&2; exit 1
        fi ;;
    *device_count*) echo "${STUB_GPUS:-0}" ;;
    "-m venv"*) mkdir -p "$3/bin"; cp "$me" "$3/bin/python" ;;
    "-m pip"*)
        [[ -z ${STUB_PIP_SLEEP:-} ]] || sleep "$STUB_PIP_SLEEP"
        [[ ${STUB_PIP:-0} == 0 ]] || exit "$STUB_PIP"
        touch "$(dirname "$me")/installed" ;;
    *status.py*) exit "${@: -1}" ;;
    *finalize.py*)
        [[ -z ${STUB_FINALIZE_SLEEP:-} ]] || exec sleep "$STUB_FINALIZE_SLEEP"
        exit "${STUB_FINALIZE:-0}" ;;
    *selfcheck.py*)
        [[ -z ${STUB_SELFCHECK_SLEEP:-} ]] || exec sleep "$STUB_SELFCHECK_SLEEP"
        exit "${STUB_SELFCHECK:-0}" ;;
    *grpo.py*) echo "${CUDA_VISIBLE_DEVICES-all}" >"$STUB_LOG.gpus"; exit "${STUB_TRAIN:-0}" ;;
esac
"""


class Box:
    """A copy of the scripts, no /app and a stand-in python3. run() runs a script; `calls`: what it called."""

    def __init__(self, folder: Path):
        self.repo, self.app, self.bin = folder / "repo", folder / "app", folder / "bin"
        self.log = folder / "calls"
        for name in (
            "train.sh",
            "test.sh",
            "scripts/setup.sh",
            "methods/main/train.sh",
            *(f"methods/{name}/train.sh" for name in METHODS),
            "open_r1/versions.py",
            "zero2.json",
            "zero3.json",
        ):
            (self.repo / name).parent.mkdir(parents=True, exist_ok=True)
            (self.repo / name).write_text((ROOT / name).read_text().replace("/app/", f"{self.app}/"))
        (self.repo / "methods/demo").mkdir()
        (self.repo / "methods/demo/train.sh").write_text('echo "demo:$*"\nexit ${STUB_DEMO:-0}\n')
        self.bin.mkdir()
        (self.bin / "python3").write_text(PYTHON)
        (self.bin / "python3").chmod(0o755)

    def fill_app(self) -> None:
        for name in ("models/Qwen2-VL-2B-Instruct", "data/train", "data/val", "data/ood_val"):
            (self.app / name).mkdir(parents=True)

    def environment(self, settings: dict[str, object]) -> dict[str, str]:
        plain = {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "HOME": os.environ.get("HOME", "/"),
            "STUB_LOG": str(self.log),
        }
        return plain | {name: str(value) for name, value in settings.items()}

    def run(self, *arguments: str, script: str = "train.sh", cwd: Path | None = None, **settings: object):
        self.log.unlink(missing_ok=True)
        command = ["bash", str(self.repo / script), *arguments]
        environment = self.environment(settings)
        return subprocess.run(
            command, env=environment, cwd=cwd or self.repo, capture_output=True, text=True, timeout=60
        )

    @property
    def calls(self) -> list[list[str]]:
        return (
            [line.split(SEPARATOR) for line in self.log.read_text().splitlines()] if self.log.exists() else []
        )

    def calls_with(self, name: str) -> list[list[str]]:
        """The calls of a script or module, by its last name."""
        return [call for call in self.calls if any(argument.split("/")[-1] == name for argument in call[1:3])]

    def training(self) -> list[str]:
        (call,) = self.trainings()
        return call

    def trainings(self) -> list[list[str]]:
        return [call for call in self.calls if f"{self.repo}/open_r1/grpo.py" in call]


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


@pytest.fixture
def full_box(box: Box) -> Box:
    box.fill_app()
    return box


def value(call: list[str], flag: str) -> str:
    """The value that counts: the last one."""
    return call[len(call) - 1 - call[::-1].index(flag) + 1]


def one_sentence(result: subprocess.CompletedProcess) -> str:
    assert result.returncode != 0
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


# --- what is trained on


def test_without_app_and_variables_the_demo_runs_with_the_same_arguments(box: Box):
    result = box.run("--max_steps", "3", "--out put")
    assert result.returncode == 0
    assert "neither MODEL nor DATA is set" in result.stdout
    assert result.stdout.splitlines()[-1] == "demo:--max_steps 3 --out put"
    assert box.calls == []


def test_the_demos_exit_code_passes_through(box: Box):
    assert box.run(STUB_DEMO=5).returncode == 5


@pytest.mark.parametrize("name", ["MODEL", "DATA", "VAL", "OOD_VAL"])
@pytest.mark.parametrize("fixture", ["box", "full_box"])
def test_a_variable_that_names_nothing_is_an_error(
    name: str, fixture: str, request: pytest.FixtureRequest, tmp_path: Path
):
    box = request.getfixturevalue(fixture)
    result = box.run(**{name: tmp_path / "nowhere"})
    assert f"{name}={tmp_path / 'nowhere'} does not exist" in result.stderr and result.returncode == 1
    assert "demo:" not in result.stdout
    assert box.calls == []


def test_a_model_without_data_is_an_error_and_no_demo(box: Box, tmp_path: Path):
    result = box.run(MODEL=tmp_path, OOD_VAL=tmp_path / "nowhere")
    assert result.returncode == 1
    faults = result.stderr.splitlines()  # all of them
    assert len(faults) == 2 and "nowhere does not exist" in faults[0] and "set DATA" in faults[1]
    assert "demo:" not in result.stdout


def test_the_apps_folders_are_the_defaults(full_box: Box):
    assert full_box.run().returncode == 0
    call = full_box.training()
    assert value(call, "--model_name_or_path") == f"{full_box.app}/models/Qwen2-VL-2B-Instruct"
    assert value(call, "--dataset_name") == f"{full_box.app}/data/train"
    assert value(call, "--val_dataset") == f"{full_box.app}/data/val"
    assert value(call, "--ood_val_dataset") == f"{full_box.app}/data/ood_val"
    assert value(call, "--submission_dir") == f"{full_box.app}/submission"
    assert value(call, "--output_dir") == f"{full_box.repo}/outputs/main"


def test_a_path_with_spaces_is_one_argument_and_a_missing_validation_set_is_none(box: Box, tmp_path: Path):
    data = tmp_path / "my rows"
    data.mkdir()
    assert (
        box.run(
            MODEL=tmp_path, DATA=data, VAL=data, OUT=tmp_path / "out", SUBMISSION=tmp_path / "best"
        ).returncode
        == 0
    )
    call = box.training()
    assert value(call, "--dataset_name") == value(call, "--val_dataset") == str(data)
    assert "--ood_val_dataset" not in call
    (check,) = box.calls_with("selfcheck.py")
    assert check[check.index("--model") :] == [
        "--model", str(tmp_path / "best"), "--data", str(data), "--out", str(tmp_path / "out/selfcheck"),
    ]  # fmt: skip


def test_a_flag_names_a_hub_data_set(box: Box, tmp_path: Path):
    assert box.run("--dataset-name=owner/rows", MODEL=tmp_path, VAL=tmp_path).returncode == 0
    assert value(box.training(), "--dataset_name") == "owner/rows"


def test_without_validation_rows_nothing_starts(box: Box, tmp_path: Path):
    result = box.run(MODEL=tmp_path, DATA=tmp_path)
    assert result.returncode == 1 and "neither VAL nor OOD_VAL is set" in result.stderr


def test_epochs_that_are_asked_for_decide(full_box: Box):
    full_box.run("--num_train_epochs", "2")
    assert value(full_box.training(), "--max_steps") == "-1"


def test_the_self_check_follows_the_flags(full_box: Box):
    full_box.run("--submission_dir", "mine", "--output_dir=logs")
    (check,) = full_box.calls_with("selfcheck.py")
    assert value(check, "--model") == "mine"
    assert value(check, "--out") == "logs/selfcheck" and "--split" not in check
    full_box.run("--dataset_test_split", "held_out")
    (check,) = full_box.calls_with("selfcheck.py")
    assert value(check, "--split") == "held_out"


# --- how it is launched


@pytest.mark.parametrize(
    "gpus, flags, accumulation",
    [
        (0, [], 16),
        (1, [], 16),
        (2, [], 8),
        (8, [], 2),
        (2, ["--prompts_per_row", "4"], 2),
        (1, ["--prompts-per-row=16"], 1),
        (3, ["--gradient_accumulation_steps", "5"], 5),
        (2, ["--prompts_per_row", "3", "--gradient_accumulation_steps=4"], 4),
    ],
)
def test_an_update_has_16_prompts(full_box: Box, gpus: int, flags: list[str], accumulation: int):
    result = full_box.run(*flags, STUB_GPUS=gpus)
    assert result.returncode == 0, result.stderr
    call = full_box.training()
    recipe = call[: len(call) - len(flags)]
    assert value(recipe, "--gradient_accumulation_steps") == str(accumulation)
    prompts = max(gpus, 1) * accumulation * int(value(recipe, "--prompts_per_row"))
    assert f"= {prompts} prompts" in result.stdout


@pytest.mark.parametrize(
    "gpus, flags, named",
    [
        (3, [], "3 processes"),
        (2, ["--prompts_per_row", "5"], "--prompts_per_row 5"),
        (32, [], "32 processes"),
        (1, ["--prompts_per_row", "zero"], "--prompts_per_row zero"),
    ],
)
def test_an_update_that_does_not_divide_is_refused(full_box: Box, gpus: int, flags: list[str], named: str):
    assert named in one_sentence(full_box.run(*flags, STUB_GPUS=gpus))
    assert full_box.trainings() == []


def test_two_gpus_are_launched_under_zero3_and_the_users_flags_come_last(full_box: Box):
    mine = ["--max_steps", "7", "--my text", "a b", ""]
    assert full_box.run(*mine, STUB_GPUS=4, NUM_GPUS=2).returncode == 0
    call = full_box.training()
    assert call[1] == f"{full_box.repo}/scripts/launch.py"
    launcher, script = call[: call.index(f"{full_box.repo}/open_r1/grpo.py")], call[-len(mine) :]
    assert value(launcher, "--num_processes") == "2"
    assert (
        value(launcher, "--deepspeed_config_file")
        == value(call, "--deepspeed")
        == f"{full_box.repo}/zero3.json"
    )
    assert value(call, "--bf16") == "true"
    assert script == mine


def test_one_choice_of_deepspeed_drives_the_launcher_and_the_script(full_box: Box, tmp_path: Path):
    own = tmp_path / "own.json"
    own.write_text("{}")
    two = f"{full_box.repo}/zero2.json"
    for flags, zero, chosen in (
        ([], "zero2.json", two), ([], own, own), (["--deepspeed", "zero2.json"], own, two),
        (["--deepspeed=zero2.json", "--max_steps", "3"], "", two),
    ):  # fmt: skip
        assert full_box.run(*flags, STUB_GPUS=2, ZERO=zero).returncode == 0
        call = full_box.training()
        assert [call[i + 1] for i, name in enumerate(call) if name == "--deepspeed"] == [str(chosen)]
        assert value(call, "--deepspeed_config_file") == str(chosen) and "--deepspeed=zero2.json" not in call
    assert call[-2:] == ["--max_steps", "3"]
    for gpus in (2, 0):
        assert "ZERO=" in one_sentence(full_box.run(STUB_GPUS=2, NUM_GPUS=gpus, ZERO="zero7.json"))
    refused = full_box.run("--deepspeed", "zero2.json", STUB_GPUS=2, NUM_GPUS=0)
    assert "--deepspeed zero2.json needs GPUs" in one_sentence(refused)


def test_several_machines(full_box: Box):
    """The launcher's own flags; all share the prompts of an update; machine 0 alone checks the end."""
    place = {"NUM_MACHINES": 2, "MAIN_PROCESS_IP": "10.0.0.1"}
    for rank, gpus in ((0, 2), (1, 2), (1, 0)):
        done = full_box.run(STUB_GPUS=2, NUM_GPUS=gpus, MACHINE_RANK=rank, MAIN_PROCESS_PORT=1234, **place)
        assert done.returncode == 0, done.stderr
        call, processes = full_box.training(), 2 * max(1, gpus)
        for name, expected in (
            ("num_processes", processes), ("num_machines", 2), ("machine_rank", rank),
            ("main_process_ip", "10.0.0.1"), ("main_process_port", 1234),
            ("deepspeed_multinode_launcher", "standard"), ("gradient_accumulation_steps", 16 // processes),
        ):  # fmt: skip
            assert value(call, f"--{name}") == str(expected), name
        assert ("--use_deepspeed" in call) == (gpus > 0)
        assert bool(full_box.calls_with("selfcheck.py")) == (rank == 0)
    for wrong in (
        {"NUM_MACHINES": 2}, {"NUM_MACHINES": 0}, place | {"MACHINE_RANK": 2}, place | {"MACHINE_RANK": "x"},
        place | {"MAIN_PROCESS_PORT": "x"},
    ):  # fmt: skip
        assert re.search("MACHINE|MAIN_PROCESS_IP|PORT", one_sentence(full_box.run(STUB_GPUS=2, **wrong)))
        assert full_box.trainings() == []


def test_no_gpu_is_one_plain_process(full_box: Box):
    assert full_box.run(STUB_GPUS=2, NUM_GPUS=0).returncode == 0
    call = full_box.training()
    assert call[1] == f"{full_box.repo}/open_r1/grpo.py"
    assert value(call, "--use_cpu") == "true" and value(call, "--bf16") == "false"
    assert "--deepspeed" not in call
    assert Path(f"{full_box.log}.gpus").read_text() == "\n"


@pytest.mark.parametrize("number", ["3", "two", "-1"])
def test_a_wrong_number_of_gpus_is_refused(full_box: Box, number: str):
    assert f"NUM_GPUS={number}" in one_sentence(full_box.run(STUB_GPUS=2, NUM_GPUS=number))
    assert full_box.trainings() == []


@pytest.mark.parametrize("switch", [["--dry_run"], ["--dry-run", "true"], ["--dry_run", "--max_steps", "2"]])
def test_a_dry_run_launches_nothing(full_box: Box, switch: list[str]):
    result = full_box.run(*switch, STUB_GPUS=2)
    assert result.returncode == 0
    assert "= 16 prompts" in result.stdout
    call = full_box.training()
    assert call[1] == f"{full_box.repo}/open_r1/grpo.py"
    assert call[-len(switch) :] == switch
    assert full_box.calls_with("launch.py") == full_box.calls_with("selfcheck.py") == []


@pytest.mark.parametrize("seen, shown", [({}, "0,1"), ({"CUDA_VISIBLE_DEVICES": "5,2,7"}, "5,2")])
def test_a_dry_run_sees_the_gpus_of_the_run(full_box: Box, seen: dict[str, str], shown: str):
    """It counts on a process for each."""
    full_box.run("--dry_run", STUB_GPUS=3, NUM_GPUS=2, **seen)
    assert Path(f"{full_box.log}.gpus").read_text() == f"{shown}\n"


@pytest.mark.parametrize("no", ["false", "No", "0"])
def test_dry_run_false_is_a_run(full_box: Box, no: str):
    full_box.run("--dry_run", no, STUB_GPUS=2)
    assert full_box.calls_with("launch.py")


@pytest.mark.parametrize("gpus", [0, 2])
def test_exit_codes_pass_through(full_box: Box, gpus: int):
    assert full_box.run(STUB_GPUS=gpus, STUB_TRAIN=7).returncode == 7
    assert full_box.calls_with("selfcheck.py") == []
    assert full_box.run(STUB_GPUS=gpus, STUB_SELFCHECK=2).returncode == 2


def test_averaging_comes_between_training_and_self_check(full_box: Box):
    assert full_box.run("--output_dir", "logs").returncode == 0
    order = [name for call in full_box.calls for name in map(last_name, call[1:2]) if name.endswith(".py")]
    assert order[-4:] == ["grpo.py", "status.py", "finalize.py", "selfcheck.py"]
    assert full_box.calls_with("finalize.py")[0][2:] == ["logs"]
    failed = full_box.run(STUB_FINALIZE=1)  # the model that training chose stands there and is checked
    assert failed.returncode == 1 and full_box.calls_with("selfcheck.py")
    assert "averages and mixtures were not looked at" in failed.stderr
    for no in ("false", "No"):
        assert full_box.run("--finalize", no).returncode == 0
        assert full_box.calls_with("finalize.py") == [] and full_box.calls_with("selfcheck.py")


def last_name(path: str) -> str:
    return path.split("/")[-1]


@pytest.mark.parametrize("words", [["--help"], ["--max_steps", "3", "-h"]])
def test_help_is_text_alone(box: Box, words: list[str]):
    """Nothing is installed, drawn or trained for it, with and without data."""
    result = box.run(*words, STUB_SYSTEM="missing")
    assert result.returncode == 0 and result.stdout.startswith("The counting recipe")
    assert "bash train.sh --dry_run" in result.stdout and "set -euo" not in result.stdout
    assert box.calls == [] and "demo:" not in result.stdout


def test_a_file_of_flags_is_refused(full_box: Box):
    """The recipe's flags would override it."""
    assert "--config" in one_sentence(full_box.run("--config", "mine.yaml"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("part", ["finalize", "selfcheck"])
def test_a_signal_after_training_ends_the_rest_too(full_box: Box, number: signal.Signals, part: str):
    environment = full_box.environment({f"STUB_{part.upper()}_SLEEP": 61.25})
    command = ["bash", full_box.repo / "train.sh"]
    script = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    while not full_box.calls_with(f"{part}.py"):
        time.sleep(0.02)
    time.sleep(0.1)
    script.send_signal(number)
    error = script.communicate(timeout=20)[1]
    assert f"exit code {128 + number}: all is trained" in error
    undone = "averages and mixtures were not looked at" if part == "finalize" else "self-check did not end"
    assert undone in error and error.count("exit code") == 1
    assert script.returncode == 128 + number
    assert subprocess.run(["pgrep", "-f", "^sleep 61.25$"], stdout=subprocess.PIPE).returncode == 1


def test_methods_main_is_the_same_run_from_any_directory(full_box: Box, tmp_path: Path):
    full_box.run("--seed 7", "a b", STUB_GPUS=2)
    from_root = timeless(full_box.calls)
    result = full_box.run("--seed 7", "a b", script="methods/main/train.sh", cwd=tmp_path, STUB_GPUS=2)
    assert result.returncode == 0
    assert timeless(full_box.calls) == from_root


def timeless(calls: list[list[str]]) -> list[list[str]]:
    """status.py is also told the second at which the run began."""
    return [["the second" if re.fullmatch(r"\d{10}\.\d+", part) else part for part in call] for call in calls]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_mains_flags_and_the_few_that_differ(full_box: Box, name: str):
    """Its flags come behind main's and before the user's; its outputs have a folder of their own."""
    result = full_box.run("--eval_steps", "7", "--beta", "0.01", script=f"methods/{name}/train.sh")
    assert result.returncode == 0, result.stderr
    call = full_box.training()
    flag, chosen = METHODS[name]
    assert value(call, flag) == chosen
    if flag == "--reward_funcs":
        assert value(call, "--reward_weights") == "1.0"
    assert (value(call, "--eval_steps"), value(call, "--beta")) == ("7", "0.01")
    assert value(call, "--output_dir") == f"{full_box.repo}/outputs/{name}"


@pytest.mark.parametrize("name", METHODS)
def test_a_method_without_a_model_is_the_demo(box: Box, name: str):
    result = box.run("--max_steps", "3", script=f"methods/{name}/train.sh")
    shown = result.stdout.splitlines()[-1]
    assert result.returncode == 0 and shown.startswith("demo:{} {} ".format(*METHODS[name]))
    assert shown.endswith(" --max_steps 3")


def test_relative_paths_mean_the_users_directory(box: Box, tmp_path: Path):
    (tmp_path / "elsewhere/rows").mkdir(parents=True)
    result = box.run(cwd=tmp_path / "elsewhere", MODEL="rows", DATA="rows", VAL="rows")
    assert result.returncode == 0, result.stderr
    assert value(box.training(), "--dataset_name") == "rows"


# --- set-up


def test_a_python_with_the_packages_is_used_as_it_is(full_box: Box):
    assert full_box.run().returncode == 0
    assert {call[0] for call in full_box.calls} == {str(full_box.bin / "python3")}
    assert full_box.calls_with("venv") == full_box.calls_with("pip") == []
    assert not (full_box.repo / ".venv").exists()


def test_untested_versions_are_refused_and_nothing_is_installed(full_box: Box):
    assert one_sentence(full_box.run(STUB_SYSTEM="outside")) == "trl is too old"
    assert full_box.calls_with("venv") == full_box.trainings() == []


def test_missing_packages_are_installed_once(full_box: Box):
    venv = full_box.repo / ".venv"
    result = full_box.run(STUB_SYSTEM="missing")
    assert result.returncode == 0, result.stderr
    assert "torch>=2.11,<2.15" in result.stdout and "GB to download" in result.stdout
    (pip,) = full_box.calls_with("pip")
    assert pip[0] == str(venv / "bin/python") and pip[-3:] == [
        "-r",
        f"{full_box.repo}/requirements.txt",
        "-q",
    ]
    assert (venv / "COMPLETE").exists()
    assert full_box.training()[0] == str(venv / "bin/python")

    assert full_box.run(STUB_SYSTEM="missing").returncode == 0
    assert full_box.calls_with("pip") == []
    assert full_box.training()[0] == str(venv / "bin/python")


def test_a_failed_installation_is_no_finished_one(full_box: Box):
    result = full_box.run(STUB_SYSTEM="missing", STUB_PIP=1)
    assert "pip wheel" in one_sentence(result)
    assert not (full_box.repo / ".venv/COMPLETE").exists()
    assert full_box.trainings() == []
    assert full_box.run(STUB_SYSTEM="missing").returncode == 0
    assert len(full_box.calls_with("pip")) == 1


def test_a_venv_without_its_marker_is_half_made(full_box: Box):
    full_box.run(STUB_SYSTEM="missing")
    (full_box.repo / ".venv/COMPLETE").unlink()  # killed between the last package and the marker
    (full_box.repo / ".venv/bin/mine").touch()
    full_box.run(STUB_SYSTEM="missing")
    assert len(full_box.calls_with("pip")) == 1
    assert (full_box.repo / ".venv/COMPLETE").exists() and (full_box.repo / ".venv/bin/mine").exists()


def test_a_killed_installation_leaves_no_lock(full_box: Box):
    environment = full_box.environment({"STUB_SYSTEM": "missing", "STUB_PIP_SLEEP": 30})
    killed = subprocess.Popen(["bash", full_box.repo / "train.sh"], env=environment, start_new_session=True)
    while not full_box.calls_with("pip"):
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not (full_box.repo / ".venv/COMPLETE").exists()
    assert full_box.run(STUB_SYSTEM="missing").returncode == 0
    assert full_box.training()


def test_two_starts_at_once_install_once(full_box: Box):
    environment = full_box.environment({"STUB_SYSTEM": "missing", "STUB_PIP_SLEEP": 0.5})
    both = [subprocess.Popen(["bash", full_box.repo / "train.sh"], env=environment) for _ in range(2)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    assert len(full_box.calls_with("pip")) == 1
    assert len(full_box.trainings()) == 2


def test_a_folder_of_wheels_is_installed_from_without_a_network(full_box: Box):
    (full_box.repo / "wheels").mkdir()
    full_box.run(STUB_SYSTEM="missing")
    (pip,) = full_box.calls_with("pip")
    assert "--no-index" in pip and value(pip, "--find-links") == f"{full_box.repo}/wheels"


def test_python_is_what_the_variable_says(full_box: Box):
    other = full_box.bin / "other"
    shutil.copy(full_box.bin / "python3", other)
    assert full_box.run(PYTHON=other).returncode == 0
    assert {call[0] for call in full_box.calls} == {str(other)}
    assert "PYTHON" in one_sentence(full_box.run(PYTHON=full_box.bin / "nowhere"))


def test_test_sh_hands_its_arguments_to_pytest(full_box: Box):
    result = full_box.run("-k", "one or two", script="test.sh", STUB_SYSTEM="missing")
    assert result.returncode == 0, result.stderr
    (pip,) = full_box.calls_with("pip")
    assert f"{full_box.repo}/requirements-dev.txt" in pip
    (call,) = full_box.calls_with("pytest")
    assert call[1:] == ["-m", "pytest", "tests", "-q", "-n", "2", "--dist", "loadfile", "-k", "one or two"]


# --- what the scripts say to others


@pytest.mark.parametrize(
    "script", [*sorted(ROOT.glob("*.sh")), *sorted(ROOT.glob("*/**/*.sh")), ROOT / ".ci/run"], ids=str
)
def test_scripts_parse(script: Path):
    subprocess.run(["bash", "-n", script], check=True)


def test_the_recipes_flags_are_flags_of_grpo_and_pass_its_checks(full_box: Box):
    from transformers import HfArgumentParser

    from open_r1.arguments import GRPOArguments, ModelArguments, RecipeArguments
    from open_r1.check_args import check_args

    full_box.run(NUM_GPUS=0)
    call = full_box.training()
    parser = HfArgumentParser((RecipeArguments, GRPOArguments, ModelArguments))
    recipe, arguments, model = parser.parse_args_into_dataclasses(call[2:])
    check_args(recipe, arguments, model)
    assert arguments.prompts_per_update == 16


def test_the_readme_lists_the_recipes_flags_with_their_values(full_box: Box):
    full_box.run(STUB_GPUS=1)
    call = full_box.training()
    recipe = call[call.index("--reward_funcs") : call.index("--dataloader_num_workers") + 2]
    listed, text = {}, (ROOT / "methods/main/README.md").read_text()
    table = text[text.index("\n## Flags") : text.index("\n## Other objectives")]
    for flags, values in re.findall(r"^\| (`--.*?) \| (.*?) \|", table, re.M):
        names, values = re.findall(r"--\w+", flags), re.findall(r"`(.*?)`", values)
        listed |= zip(names, values, strict=False)
    assert listed.pop("--gradient_accumulation_steps") == "prompts_per_row"  # a formula
    for name, text in listed.items():
        start = recipe.index(name) + 1
        assert recipe[start : start + len(text.split())] == text.split(), name
    flags = {argument for argument in recipe if argument.startswith("--")}
    assert flags == {*listed, "--gradient_accumulation_steps"}


@pytest.mark.parametrize("name, stage", [("zero3", 3), ("zero2", 2), ("zero3_offload", 3)])
def test_deepspeed_reads_every_key(name, stage):
    from deepspeed.runtime import constants
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    config = json.loads((ROOT / f"{name}.json").read_text())
    zero = config["zero_optimization"]
    known = set(DeepSpeedZeroConfig.model_fields) | {
        f.alias for f in DeepSpeedZeroConfig.model_fields.values()
    }
    assert set(zero) <= known
    read = DeepSpeedZeroConfig(**{key: setting for key, setting in zero.items() if setting != "auto"})
    assert read.stage == stage and read.gather_16bit_weights_on_model_save == (stage == 3)
    assert config[constants.DATA_TYPES] == {constants.GRAD_ACCUM_DTYPE: "fp32"}


# --- versions


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Pretend that these versions are here; a package that is taken out is not."""
    here = {"torch": "2.11.0+cu130", "trl": "1.16.0", "packaging": "26.4"}

    def version(name: str) -> str:
        if name not in here:
            raise metadata.PackageNotFoundError(name)
        return here[name]

    monkeypatch.setattr(metadata, "version", version)
    return here


@pytest.fixture
def requirements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "requirements.txt"
    file.write_text("# tested\ntorch>=2.11,<2.15\n\ntrl>=1.16,<1.17   # moves\npackaging>=23\n")
    monkeypatch.setattr(versions, "find_faults", lambda files=(file,), find=versions.find_faults: find(files))
    return file


def test_tested_versions_pass(installed: dict[str, str], requirements: Path, capsys: pytest.CaptureFixture):
    versions.check_versions()
    assert versions.main([str(requirements)]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("version", ["2.10.1", "2.11.0a0", "2.15.0", "2.15.0+cpu"])
def test_an_untested_version_is_refused(installed, requirements, version: str, capsys: pytest.CaptureFixture):
    installed["torch"] = version
    with pytest.raises(SystemExit) as refused:
        versions.check_versions()
    sentence = str(refused.value)
    assert f"torch>=2.11,<2.15 (here: {version})" in sentence and "trl" not in sentence
    assert "\n" not in sentence and sentence.count(". ") == 0
    assert (
        "pip wheel -r requirements.txt -w wheels" in sentence and "--no-index --find-links wheels" in sentence
    )
    assert versions.main([str(requirements)]) == 1
    assert capsys.readouterr().err.strip() == sentence


def test_a_missing_package_is_named(installed, requirements, capsys: pytest.CaptureFixture):
    del installed["trl"], installed["packaging"]
    with pytest.raises(SystemExit, match=r"trl>=1.16,<1.17 \(here: none\), packaging>=23 \(here: none\)"):
        versions.check_versions()
    assert versions.main([str(requirements)]) == versions.MISSING
    assert capsys.readouterr().out == "trl>=1.16,<1.17, packaging>=23\n"


def test_the_projects_own_python_is_named_where_there_is_one(installed, requirements, tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "REQUIREMENTS", requirements)
    del installed["trl"]
    own = tmp_path / ".venv/bin/python"
    own.parent.mkdir(parents=True)
    with pytest.raises(SystemExit, match="pip install"):  # it is not complete
        versions.check_versions()
    (tmp_path / ".venv/COMPLETE").touch()
    with pytest.raises(SystemExit, match=f"{re.escape('trl>=1.16,<1.17 (here: none)')}.* use {own}"):
        versions.check_versions()


def test_the_tests_themselves_run_on_tested_versions():
    versions.check_versions()


@pytest.mark.parametrize("script", ["train.sh", "methods/demo/train.sh"])
def test_editing_a_script_does_not_disturb_its_run(script):
    """bash reads on while it runs, so an edit in the hours of training would be executed from its middle."""
    lines = (ROOT / script).read_text().splitlines()
    code = [line for line in lines if line and not line.startswith("#")]
    assert code[1].startswith("{") and code[-2].startswith("exit ") and code[-1] == "}"
