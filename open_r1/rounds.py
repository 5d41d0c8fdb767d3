"""What a round starts from, what it is measured on and against, and what it leaves for finalize.py."""

import json
import shutil
from pathlib import Path

from . import disk
from .arguments import GRPOArguments, RecipeArguments
from .checkpoint import fsync_tree, local_model, write_atomically
from .curve import Curve
from .data import CountingData
from .install import holds_something
from .keep_best import KeepBest
from .ranks import on_rank_zero
from .run_identity import digest, measured_in, model_content
from .selection import refuse_strange, rows_of
from .submission import header_fault
from .top_masters import TopMasters

INIT = "init"  # in OUT: a copy of the model that the run started from, which the submission may replace
SOURCE = ".source"  # in it: where it was copied from
PLAN = "selection.json"  # in OUT: what finalize.py has to know


# --- The first weights


def check_round(run) -> tuple[list[str], list[str]]:
    """A check of preflight.py: the model that --init_from names is one like the base."""
    start = init_folder(run.recipe, run.out)
    if start and (fault := header_fault(run.base, start)):
        raise ValueError(f"--init_from {run.recipe.init_from}: {start} is no model like the base: {fault}")
    run.start_from = start or run.base
    return [f"starts from {start}; {run.base} is what is to be beaten"] if start else [], []


def init_folder(recipe: RecipeArguments, out: Path) -> Path | None:
    """The model to start from, or this run's copy of it, once it has started; None without --init_from."""
    if not recipe.init_from:
        return None
    source = Path(recipe.submission_dir if recipe.init_from == "submission" else recipe.init_from)
    if recipe.init_from != "submission" and _copied_from(out) != str(source.resolve()):
        try:
            source = local_model(recipe.init_from)
        except ValueError as error:
            fault = str(error).partition("; set MODEL")[0]
            raise ValueError(f"--init_from {recipe.init_from}: {fault}; set the folder of a model") from error
    if _copied_from(out) == str(source.resolve()):
        return out / INIT
    if not holds_something(source):
        raise ValueError(f"--init_from {recipe.init_from}: {source} holds no model yet; leave it out")
    return source


def _copied_from(out: Path) -> str | None:
    source = out / INIT / SOURCE
    return source.read_text() if source.exists() else None


def first_weights(recipe: RecipeArguments, out: Path, base: Path) -> Path:
    """The folder to load the policy from, on all ranks: that of --init_from is copied to OUT first, since the
    submission is replaced while the run goes on, and a run that is started again needs the same weights."""

    def copy() -> Path:
        source = init_folder(recipe, out)
        if source is None or source == out / INIT:
            return source or base
        part = out / f".{INIT}.part"
        for old in (part, out / INIT):  # of a killed run, and of one that left no checkpoint
            shutil.rmtree(old, ignore_errors=True)
        shutil.copytree(source, part, ignore=shutil.ignore_patterns(".*", "lost+found"))
        (part / SOURCE).write_text(str(source.resolve()))
        fsync_tree(part)
        return part.rename(out / INIT)

    return on_rank_zero(copy)


def files_that_define(run) -> dict[str, str]:
    """Flags that are given and name files, for run.json: what is in them counts."""
    recipe, found = run.recipe, {}
    if recipe.selection_rows:
        found["selection_rows"] = digest(Path(recipe.selection_rows).read_bytes())
    if recipe.init_from:
        found["init_from"] = model_content(run.start_from)
    return found


# --- What it is measured on and against


def validation_rows(
    recipe: RecipeArguments, args: GRPOArguments, sets: dict[str, CountingData]
) -> dict[str, list[int]]:
    """The rows of each validation set that are looked at while training."""
    refuse_strange(recipe.selection_rows, [data.source for data in sets.values()])
    return {
        name: rows_of(recipe.selection_rows, data.source, len(data), args.eval_limit)
        for name, data in sets.items()
    }


def _where(source: str) -> str:
    """A path that holds from any folder; a hub name as it is."""
    return str(Path(source).resolve()) if Path(source).exists() else source


def keeper(recipe: RecipeArguments, args: GRPOArguments, ready, start: Path) -> KeepBest:
    """What keeps the best model, and writes down for finalize.py how it chooses."""
    out, base, submission = Path(args.output_dir), ready.base, Path(recipe.submission_dir)
    run, sets = ready.identity["run"], ready.validation_sets
    rows = measured_in(ready.identity, validation_rows(recipe, args, sets))
    plan = {
        "run": run,
        "measured_in": rows,
        "base": str(base.resolve()),
        "submission": str(submission.resolve()),
        "sets": {name: _where(data.source) for name, data in sets.items()},
        "split": [recipe.dataset_test_split, recipe.dataset_config],
        "rows": {name: rows_of(recipe.selection_rows, data.source, len(data)) for name, data in sets.items()},
        "level": recipe.select_level,
        "minutes": recipe.finalize_minutes,
        "alphas": recipe.wise_alphas,
    }
    on_rank_zero(lambda: write_atomically(out / PLAN, f"{json.dumps(plan)}\n".encode()))
    top = None
    if recipe.keep_top:
        size = disk.checkpoint_bytes(ready.saved, ready.trained, bool(args.deepspeed))
        checkpoint = size if args.save_strategy != "no" else 0
        top = TopMasters(out, base, run, recipe.keep_top, checkpoint + disk.model_bytes(base))
    return KeepBest(base, submission, Curve(out, rows), level=recipe.select_level, start=start, top=top)
