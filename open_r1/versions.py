"""Is what is installed what was tested? Answered from package metadata alone, before the slow imports.

requirements.txt is the only list: pip installs from it, and this file reads it. `scripts/setup.sh` runs this
file as a program to find out whether a Python can be used.
"""

import re
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements.txt"
MISSING = 3  # exit code of the program when a package is not there; 1 when one is outside its range


def find_faults(files: Iterable[Path] = (REQUIREMENTS,)) -> tuple[list[str], list[str]]:
    """What `files` (in pip's requirements format) ask for and this Python lacks, or has in another version.

    Returns (missing, outside), each a list such as "trl>=1.16,<1.17 (here: 0.14.0)".
    """
    missing, outside = [], []
    for line in (line for file in files for line in Path(file).read_text().splitlines()):
        requirement = line.partition("#")[0].strip()
        if not requirement:
            continue
        name, ranges = re.fullmatch(r"([\w.-]+)(.*)", requirement).groups()
        here = installed(name)
        if here is None:
            missing.append(f"{requirement} (here: none)")
            continue
        if not _within(here, ranges):
            outside.append(f"{requirement} (here: {here})")
    return missing, outside


def installed(name: str) -> str | None:
    """The version of a package that is here; None without it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _within(version: str, ranges: str) -> bool:
    # Imported late: it may be missing, and is then listed like any other package.
    try:
        from packaging.specifiers import SpecifierSet
    except ModuleNotFoundError:
        return True
    return SpecifierSet(ranges).contains(version, prereleases=True)


def check_versions() -> None:
    """Refuse packages that are missing or were not tested: SystemExit with one sentence."""
    missing, outside = find_faults()
    if not (missing or outside):
        return
    own = REQUIREMENTS.with_name(".venv")
    if (own / "COMPLETE").exists() and Path(sys.prefix).resolve() != own.resolve():  # made by train.sh
        faults = ", ".join(missing + outside)
        raise SystemExit(f"{sys.executable} has not what is needed ({faults}): use {own / 'bin/python'}.")
    raise SystemExit(refusal(missing + outside))


def refusal(faults: list[str]) -> str:
    """One sentence: what is needed and what is here, and how to get it with and without a network."""
    return (
        f"These scripts were tested with {', '.join(faults)}: "
        f"install with `{sys.executable} -m pip install -r {REQUIREMENTS}`, or, for a machine without a "
        "network, run `DS_BUILD_OPS=0 python -m pip wheel -r requirements.txt -w wheels` on one that has it "
        "(and the same Python version), copy the folder wheels here and run "
        f"`{sys.executable} -m pip install --no-index --find-links wheels -r {REQUIREMENTS}`."
    )


def main(files: list[str]) -> int:
    missing, outside = find_faults([Path(file) for file in files])
    if missing:
        print(", ".join(fault.split()[0] for fault in missing))
        return MISSING
    if outside:
        print(refusal(outside), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
