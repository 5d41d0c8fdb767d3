"""The documentation runs: every command of the READMEs, shortened, and every figure from committed JSON."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from open_r1.arguments import GRPOArguments, RecipeArguments
from tests.test_distributed import make_rows
from tests.tiny import save_public_form

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "benchmarks/README.md", *sorted(ROOT.glob("methods/*/README.md"))]
GENERATED = re.compile(r"<!-- (\w+) -->.*?<!-- end.*?-->", re.S)  # results, which name how they were made


def commands(page: Path) -> list[str]:
    """The commands of a page's bash blocks and of its inline code, without their comments; a line that ends
    in a backslash goes on."""
    text = GENERATED.sub("", page.read_text())
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    lines += re.findall(r"`((?:bash|python) [^`]*)`", re.sub(r"```.*?```", "", text, flags=re.S))
    return [" ".join(shlex.split(line, comments=True)) for line in lines if line.strip()]


ALL = sorted({command.removesuffix(" --dry_run") for page in PAGES for command in commands(page)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("docs")
    save_public_form(root / "Qwen2-VL-2B-Instruct", seed=0)
    save_public_form(root / "submission", seed=1)
    for seed, name in enumerate(("train", "val", "ood_val"), start=1):
        make_rows(seed, 16 if name == "train" else 3).save_to_disk(root / name)
    return root


def test_the_pages_have_commands():
    assert "bash train.sh" in ALL and "bash test.sh" in ALL and any("selfcheck.py" in c for c in ALL)


LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_pages_link_to_what_exists(page):
    gone = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not gone, gone


def test_the_recipes_name_pages_that_exist():
    scripts = [ROOT / "train.sh", *ROOT.glob("methods/*/train.sh")]
    named = {name for script in scripts for name in re.findall(r"[\w./]+\.md", script.read_text())}
    assert named and not [name for name in named if not (ROOT / name).exists()]


def test_the_pages_name_flags_that_exist():
    programs = [*ROOT.glob("*.py"), *ROOT.glob("methods/**/*.*"), *ROOT.glob("benchmarks/*.py")]
    programs += [*ROOT.glob("open_r1/*.py"), *ROOT.glob("*.sh"), *ROOT.glob("tools/*.py")]
    sources = "\n".join(file.read_text() for file in programs if file.suffix in (".py", ".sh"))
    known = {name for config in (RecipeArguments, GRPOArguments) for name in config.__dataclass_fields__}
    known |= set(re.findall(r"--(\w+)", sources)) | {"shm-size", "no-deps"}  # of docker and of pip
    for page in PAGES:
        named = set(re.findall(r"--([a-z][\w-]*)", page.read_text()))
        assert named <= known, (page, named - known)


@pytest.mark.parametrize("command", ALL)
def test_command(command, folder, tmp_path):
    """train.sh with --dry_run and the tests' model and rows where the page names a place on the reader's
    machine; test.sh collects only (this is the suite); selfcheck in full; the others show their help."""
    command = command.replace("/path/to", str(folder))
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "NUM_GPUS": "0"}
    environment |= {"MODEL": str(folder / "Qwen2-VL-2B-Instruct"), "DATA": str(folder / "train")}
    environment |= {"VAL": str(folder / "val"), "OOD_VAL": str(folder / "ood_val")}
    environment |= {"OUT": str(tmp_path / "out"), "SUBMISSION": str(tmp_path / "submission")}
    if command.startswith("python "):
        command = f"{shlex.quote(sys.executable)} {command.removeprefix('python ')}"
    if "train.sh" in command:
        command += " --dry_run"
    elif "test.sh" in command:
        command += " --collect-only"
    elif "selfcheck.py" in command:
        command += f" --out {tmp_path / 'selfcheck'} --dataloader_num_workers 0"
    else:
        command += " --help"  # the flags before it are read, and refused where they are wrong
    if "--reward_funcs accuracy format nearness" in command:
        # The page's own function, added to a copy of the project as the page says.
        copy_with_reward(tmp_path)
    where = tmp_path / "project" if (tmp_path / "project").exists() else ROOT
    done = subprocess.run(
        ["bash", "-c", command], cwd=where, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    if "train.sh" in command:
        assert "ready: nothing was launched" in done.stdout
    if "nearness" in command:
        assert re.search(r"nearness\s+0.3\s", done.stdout), "the new reward is not in the table of rewards"


def copy_with_reward(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    for name in ("open_r1", "scripts", "train.sh", "requirements.txt", "zero3.json"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(project / name)], check=True)
    page = (ROOT / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.S)[1]
    function, registry = code.split("\n\n\n")
    script = project / "open_r1/grpo.py"
    old = re.compile(r"reward_funcs_registry = \{.*?\n\}\n", re.S)
    script.write_text(old.sub(lambda _: f"{function}\n\n\n{registry}", script.read_text()))


def test_the_results_are_those_of_the_json_files():
    done = subprocess.run(
        [sys.executable, ROOT / "tools/readme.py", "--check"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
