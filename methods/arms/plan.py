"""Sets of arms: the flags of each, and the rule that arms of a set differ in the named flags only.

A set is a YAML or JSON file (methods/arms/sets/NAME.yaml):

    reference: main                       the arm that the others are compared with
    may_differ: [token_weights]           every flag in which an arm may differ from it
    arms:
      main: {what: the counting recipe}
      prpo: {what: PRPO, flags: {token_weights: prpo}}

The flags of an arm come after those of the study's recipe and the ones that all arms share. A set without
`study` is of the demo; Study has what can stand there, with paths from the project's folder. `kind: sft` is
no arm of GRPO: the reference's base imitates a column of the rows (`column`, by default written-out counting)
for as long as the reference trained, or `as_many_rows`, or a number of `seconds`. An arm that comes `after`
one of SFT starts from what that has made with the same seed.
"""

import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "methods/demo"
BASE, DATA = DEMO / "base", DEMO / "runs/data"
SETS = Path(__file__).resolve().parent / "sets"
KINDS = ("grpo", "sft")
NAME = re.compile(r"[\w-]+")  # of an arm's folder
RUNS_OWN = {"output_dir", "submission_dir", "seed"}  # where a job lies, and which it is


class Refused(Exception):
    """One sentence for the user."""


@dataclass(frozen=True)
class Arm:
    name: str
    what: str = ""  # in words, for the table
    kind: str = "grpo"
    flags: dict[str, Any] = field(default_factory=dict)
    column: str = "completion"  # of the rows, that SFT imitates
    as_many_rows: bool = False  # SFT sees as many as the reference, however long that takes
    seconds: float | None = None  # SFT takes, at the reference's side instead of after it
    after: str | None = None  # the arm of SFT whose model it starts from


@dataclass(frozen=True)
class Study:
    """What all arms of a set start from, on which rows, by whose flags. The recipe's folder has the draw.py
    of the rows."""

    base: Path = BASE
    data: Path = DATA
    recipe: Path = DEMO / "train.sh"  # a script whose recipe=( … ) comes after train.sh's
    gpu: bool = False  # jobs share the GPU, or have one core each
    sft: dict[str, Any] = field(default_factory=dict)  # settings of SFT, after those of the demo
    about: str = "the demo's model: 1.4 million parameters, drawn pictures"

    @classmethod
    def of(cls, given: dict[str, Any]) -> "Study":
        paths = {name: ROOT / given[name] for name in ("base", "data", "recipe") if name in given}
        return cls(**given | paths)


@dataclass(frozen=True)
class ArmSet:
    name: str
    reference: str
    may_differ: frozenset[str]
    arms: dict[str, Arm]
    study: Study = field(default_factory=Study)


def load_set(name: str) -> ArmSet:
    """The set of a file, or of that name in methods/arms/sets. Raises Refused for what is no such set, and
    for an arm that sets a flag outside may_differ."""
    path = Path(name) if Path(name).suffix in (".yaml", ".json") else SETS / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in SETS.glob("*.yaml")))
        raise Refused(f"--arms {name}: there is no {path}; give a .yaml or .json file, or one of {known}")
    try:
        given = yaml.safe_load(path.read_text())  # JSON is YAML
        arms = {key: Arm(key, **(value or {})) for key, value in given["arms"].items()}
        may_differ = given["may_differ"]
        may_differ = [may_differ] if isinstance(may_differ, str) else may_differ
        study = Study.of(given.get("study", {}))
        made = ArmSet(path.stem, given["reference"], frozenset(may_differ), arms, study)
    except (TypeError, KeyError, AttributeError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise Refused(f"{path} is no set of arms ({why}); methods/arms/sets has some") from error
    if made.reference not in arms or arms[made.reference].kind != "grpo":
        raise Refused(f"{path}: reference {made.reference} is none of its arms of GRPO")
    for arm in arms.values():
        if not isinstance(arm.name, str) or not NAME.fullmatch(arm.name):
            raise Refused(f"{path}: arm {arm.name}: it names a folder; set letters, digits, - and _")
        if arm.name == "base":
            raise Refused(f"{path}: arm base: that is what all arms start from; set another name")
        if not isinstance(arm.flags, dict):
            raise Refused(f"{path}: arm {arm.name}: flags {arm.flags}; set {{flag: value, …}}")
        if arm.kind not in KINDS:
            raise Refused(f"{path}: arm {arm.name} is of kind {arm.kind}; set one of {', '.join(KINDS)}")
        if arm.after and (arm.after not in arms or arms[arm.after].kind != "sft" or arms[arm.after].after):
            raise Refused(f"{path}: arm {arm.name}: after {arm.after}; set an arm of SFT that is after none")
        if own := RUNS_OWN & set(arm.flags):
            raise Refused(f"{path}: arm {arm.name} sets --{sorted(own)[0]}, which run.py sets for every job")
        if others := set(arm.flags) - made.may_differ:
            raise Refused(
                f"{path}: arm {arm.name} sets --{sorted(others)[0]}, which is not in may_differ: arms would "
                "differ in more than what is compared"
            )
    return made


# --- flags


def recipe(script: Path, **variables: str) -> list[str]:
    """The words of the script's `recipe=( … )`, as bash makes them of it. The variables that it names must be
    given."""
    read = 'eval "$(sed -n "/^recipe=(/,/^)/p" "$1")"; printf "%s\\0" "${recipe[@]}"'
    command = ["bash", "-euc", read, "recipe", str(script)]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    if done.returncode:
        raise Refused(f"the flags of {script} cannot be read: {done.stderr.strip()}")
    return done.stdout.split("\0")[:-1]


def words(flags: dict[str, Any]) -> list[str]:
    """{"beta": 0.04} -> ["--beta", "0.04"]; a list is several values."""
    made = []
    for name, value in flags.items():
        values = value if isinstance(value, list) else [value]
        made += [f"--{name}", *(str(one).lower() if isinstance(one, bool) else str(one) for one in values)]
    return made


def given(line: list[str], flag: str) -> Any:
    """What a command line gives to --flag, the last time; None without it."""
    at = max((i for i, word in enumerate(line) if word == f"--{flag}"), default=None)
    if at is None:
        return None
    values = []
    for word in line[at + 1 :]:
        if word.startswith("--"):
            break
        values.append(yaml.safe_load(word))
    if not values:  # a switch
        return True
    return values[0] if len(values) == 1 else values


def command_line(
    arm: Arm, seed: int, shared: dict[str, Any], out: Path, study: Study, model: Path | None = None
) -> list[str]:
    """The flags of grpo.py: those of train.sh on this machine, those of the study, `shared`, the arm's own.
    `model` is what it starts from, by default the study's base."""
    places = {
        "MODEL": model or study.base, "DATA": study.data / "train", "VAL": study.data / "val",
        "OOD_VAL": study.data / "ood", "OUT": out, "SUBMISSION": out / "submission",
        "prompts_per_row": 4, "accumulation": 4, "max_steps": 400,
    }  # fmt: skip
    variables = {name: str(value) for name, value in places.items()}
    main, own = recipe(ROOT / "train.sh", **variables), recipe(study.recipe, **variables)
    machine = [] if study.gpu else words({"use_cpu": True, "bf16": False})
    return [*main, *machine, *own, *words(shared), *words(arm.flags), "--seed", str(seed)]


def parsed(line: list[str]) -> dict[str, Any]:
    """The flags that decide a run's result, as OUT/run.json records them. Raises Refused."""

    from open_r1.arguments import GRPOArguments, ModelArguments, RecipeArguments
    from open_r1.check_args import check_args
    from open_r1.flag_parser import FlagParser
    from open_r1.run_identity import defining_flags

    try:
        recipe_args, args, model = FlagParser((RecipeArguments, GRPOArguments, ModelArguments)).parse(line)
        check_args(recipe_args, args, model)
    except ValueError as error:
        raise Refused(str(error)) from error
    return defining_flags(recipe_args, args, model)


def difference(reference: dict[str, Any], other: dict[str, Any]) -> dict[str, list]:
    """{flag: [value in the reference, value in the other]} of the flags that differ."""
    return {
        name: [reference.get(name), other.get(name)]
        for name in sorted(reference.keys() | other.keys())
        if reference.get(name) != other.get(name)
    }


def check_flags(arms: ArmSet, shared: dict[str, Any]) -> None:
    """Raises Refused for an arm whose flags are not those of the reference and its own."""
    lines = {
        arm.name: command_line(arm, 0, shared, Path("out"), arms.study)
        for arm in arms.arms.values()
        if arm.kind == "grpo"
    }
    flags = {}
    for name, line in lines.items():
        try:
            flags[name] = parsed(line)
        except Refused as refused:
            raise Refused(f"arm {name} of {arms.name}: {refused}") from refused
    for name in flags:
        refuse_others(name, difference(flags[arms.reference], flags[name]), arms)


def refuse_others(name: str, differing: dict[str, list], arms: ArmSet) -> None:
    for flag in sorted(set(differing) - arms.may_differ):
        before, after = differing[flag]
        raise Refused(
            f"arm {name} of {arms.name} has --{flag} {after} where {arms.reference} has {before}, and "
            f"may_differ does not name it"
        )


def refuse_other_material(name: str, reference: dict, identity: dict, arms: ArmSet) -> None:
    """`identity` is a run's OUT/run.json. Raises Refused unless it started from the reference's weights (or
    after another arm), on the reference's rows, and differs from it in named flags only."""
    for part in ("model", "data")[bool(arms.arms[name].after) :]:
        if _contents(identity[part]) != _contents(reference[part]):
            raise Refused(f"arm {name} of {arms.name} had another {part} than {arms.reference}")
    refuse_others(name, difference(reference["flags"], identity["flags"]), arms)


def _contents(part: dict) -> Any:
    """Without paths."""
    if "content" in part:
        return part["content"]
    return {name: (one["rows"], one["content"]) for name, one in part.items()}
