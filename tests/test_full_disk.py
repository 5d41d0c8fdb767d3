"""A run whose disk is really full: OUT lies on a small tmpfs, in a mount namespace of its own."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from open_r1.checkpoint import is_valid_model
from open_r1.complete import newest_complete
from tests.test_grpo import ROOT, flags, folder, lines, run  # noqa: F401 (folder is a fixture)

OWN_MOUNTS = ["unshare", "--map-root-user", "--mount"]
MAY_MOUNT = shutil.which("unshare") and subprocess.run([*OWN_MOUNTS, "true"], capture_output=True)
MAY_MOUNT = MAY_MOUNT and MAY_MOUNT.returncode == 0
ON_A_SMALL_DISK = """
mount -t tmpfs -o size="$1" tmpfs "$SMALL" || exit 99
shift; "$@"; code=$?
cp -r "$SMALL" "$KEPT"; exit $code
"""


@pytest.mark.skipif(not MAY_MOUNT, reason="unshare may not make a mount namespace here")
@pytest.mark.parametrize("megabytes, fits", [(6, False), (24, True)])
def test_a_disk_too_small_is_refused_and_one_that_fills_up_does_not_end_the_run(
    folder,  # noqa: F811
    tmp_path,
    megabytes,
    fits,
):
    small, kept = tmp_path / "small", tmp_path / "kept"
    small.mkdir()
    arguments = [
        sys.executable, ROOT / "open_r1/grpo.py",
        *flags(folder, small / "out", "--max_steps", 6, "--save_steps", 1, "--report_to", "tensorboard"),
        "--reward_funcs", "tests.rewards.letters_on_a_full_disk", "accuracy",
        "--val_dataset", folder / "val", "--eval_strategy", "steps", "--eval_steps", 2,
        "--submission_dir", small / "submission",
    ]  # fmt: skip
    done = subprocess.run(
        [*OWN_MOUNTS, "bash", "-c", ON_A_SMALL_DISK, "bash", f"{megabytes}M", *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=280,
        env=os.environ | {"OUT": str(small / "out"), "SMALL": str(small), "KEPT": str(kept)},
    )  # fmt: skip
    shown = done.stdout + done.stderr
    if not fits:
        assert done.returncode == 1 and "for 2 checkpoints and 0.00 GB for 2 submissions" in shown, shown
        return
    assert done.returncode == 0, shown
    for step in range(2, 7):
        assert f"update {step}: no checkpoint could be written" in shown
    assert "TensorBoard's files cannot be written" in shown
    assert "logs.jsonl cannot be written (No space left on device)" in shown and "Finished. 6 of 6" in shown
    assert newest_complete(kept / "out")[1]["step"] == 1 and not (kept / "out/.saving").exists()
    assert is_valid_model(kept / "submission") is None
    logged = [line["step"] for line in lines(kept / "out/logs.jsonl") if "loss" in line]
    assert logged == list(range(1, len(logged) + 1))  # none is cut short, or missing before another
    assert json.loads((kept / "out/status.json").read_text())["cause"] == "running"  # what fitted last
