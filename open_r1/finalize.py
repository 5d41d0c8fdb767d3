"""After training: the best models, their average and mixtures with the base are scored, the best submitted.

    python open_r1/finalize.py OUT                    of a run that kept float32 weights (--keep_top)
    python open_r1/finalize.py OUT --submission DIR   into another folder than the run's

The candidates: the base, what stands in the submission folder, the models in OUT/masters, their average
(a uniform soup, arXiv 2203.05482), and the best of these moved towards the base (WiSE-FT, arXiv 2109.01903).
All are scored as selfcheck.py does, on the rows that the run selects by, and selection.py chooses. The
outcome stands in OUT/finalize.txt and OUT/finalize.json. Exit code 1 and one sentence: it cannot be done, and
the submission is what it was.
"""

import argparse
import json
import math
import signal
import sys
import time
from pathlib import Path

if __package__ in (None, ""):  # run as a file, as train.sh does
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from open_r1.versions import check_versions

check_versions()

import numpy as np
import torch

from open_r1 import validation
from open_r1.checkpoint import write_atomically
from open_r1.data import load_rows
from open_r1.install import fingerprint, read_record
from open_r1.lock import lock_out, lock_submission
from open_r1.mixing import Weights, mix
from open_r1.selection import Outcome, choose, confidence, gains, rows_right
from open_r1.status import FAILED, write_status
from open_r1.submission import ensure_submission, header_fault, write_submission
from open_r1.top_masters import Master, damaged, masters_of
from selfcheck import Refused, launch, load_model

PLAN, RESULT, TABLE, STATUS = "selection.json", "finalize.json", "finalize.txt", "finalize-status.json"
IN_PLAN = {
    "run", "measured_in", "base", "submission", "sets", "split", "rows", "level", "minutes", "alphas"
}  # fmt: skip
WRITING = 0.2  # of the minutes: kept for the writing of the submission
AVERAGE = "average"
Mixture = dict[str, float]  # {name of a model: its weight}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", metavar="OUT", help="the run's folder")
    parser.add_argument("--submission", help="where the best goes (default: the run's own)")
    parser.add_argument("--minutes", type=float, help="default: the run's --finalize_minutes")
    parser.add_argument("--limit", type=int, help="rows of each set, evenly spaced (default: all)")
    parser.add_argument("--batch_size", type=int, default=64, help="rows answered together")
    parser.add_argument("--num_processes", type=int, help="default: one per visible GPU, or one on the CPU")
    parser.add_argument("--dataloader_num_workers", type=int, default=2, help="per process, to encode images")
    return parser.parse_args()


# --- What there is


def prepare(args: argparse.Namespace) -> str | None:
    """Fills `args` with what all processes need. A sentence where nothing is to be done."""

    out = Path(args.out)
    plan = read_plan(out)
    submission = Path(args.submission or plan["submission"]).resolve()
    minutes = plan["minutes"] if args.minutes is None else args.minutes
    del plan["minutes"]
    if not 0 < minutes < math.inf:
        raise Refused(f"--minutes {minutes:g}: set the minutes that it may take")
    args.plan = plan | {"submission": str(submission)}
    args.deadline = time.time() + 60 * minutes * (1 - WRITING)
    for name in ("limit", "batch_size", "num_processes"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise Refused(f"--{name} {getattr(args, name)}: set it to 1 or more")
    if args.dataloader_num_workers < 0:
        raise Refused(f"--dataloader_num_workers {args.dataloader_num_workers}: set it to 0 or more")
    args.engine, args.dtype, args.model = "fast", "auto", plan["base"]  # as the self-check's
    if fault := header_fault(Path(plan["base"]), Path(plan["base"])):
        raise Refused(f"the run's base is not what it was: {fault}")
    try:
        lock_out(out)
        lock_submission(submission)
        stands = ensure_submission(plan["base"], submission)
    except ValueError as error:
        raise Refused(str(error)) from error
    masters = usable_masters(out, plan)
    args.models = {"base": plan["base"], "submission": str(submission)}
    args.models |= {f"update {one.step}": str(one.path) for one in masters}
    args.masters = [f"update {one.step}" for one in masters]
    record = read_record(submission) or {}
    args.standing = standing(record, plan, args.masters) if stands else None
    args.inputs = {
        "plan": args.plan, "limit": args.limit,
        "masters": [[one.path.name, one.path.stat().st_mtime_ns] for one in masters],
    }  # fmt: skip
    return done_before(out, args.inputs, submission)


def read_plan(out: Path) -> dict:
    """What the run wrote down for this (rounds.keeper)."""
    try:
        plan = json.loads((out / PLAN).read_bytes())
    except (OSError, ValueError) as error:
        raise Refused(f"{out} has no readable {PLAN}; a run with --submission_dir writes it") from error
    if not isinstance(plan, dict) or not plan.keys() >= IN_PLAN or not plan["sets"]:
        raise Refused(f"{out / PLAN} is not what a run with --submission_dir writes; the run's command does")
    return plan


def usable_masters(out: Path, plan: dict) -> list[Master]:
    """The run's, without those that are damaged, each of which is named."""
    for fault in damaged(out, Path(plan["base"])):
        print(f"finalize: left out: {fault}", flush=True)
    return masters_of(out, plan["run"], Path(plan["base"]))


def standing(record: dict, plan: dict, masters: list[str]) -> Mixture | None:
    """What stands in the submission folder: one of this run's models, another's, or (None) the base."""
    if record.get("recipe") == "base":
        return None
    name = f"update {record.get('step')}"
    same = record.get("recipe") == "grpo" and record.get("measured_in") == plan["measured_in"]
    return {name: 1.0} if same and name in masters else {"submission": 1.0}


def done_before(out: Path, inputs: dict, submission: Path) -> str | None:
    """A sentence where the same was chosen from already, to its end, and nothing has changed since."""

    try:
        then = json.loads((out / RESULT).read_bytes())
        same = then["inputs"] == inputs and then["stands"] == fingerprint(submission)
        return f"nothing is new since: {then['why']}" if same and then["complete"] else None
    except (OSError, ValueError, KeyError, TypeError):  # none, or not ours
        return None


def first_candidates(standing: Mixture | None, masters: list[str]) -> dict[str, Mixture]:
    """Everything but the mixtures with the base."""
    candidates = {"base": {"base": 1.0}}
    if standing:
        candidates["submission"] = standing
    candidates |= {name: {name: 1.0} for name in masters if {name: 1.0} != standing}
    if len(masters) > 1:
        candidates[AVERAGE] = {name: 1 / len(masters) for name in masters}
    return candidates


def towards_base(name: str, mixture: Mixture, alphas: list[float]) -> dict[str, Mixture]:
    """WiSE-FT: (1 - alpha) x base + alpha x the mixture."""
    return {
        f"{alpha:g} x {name}": {"base": 1 - alpha} | {one: alpha * part for one, part in mixture.items()}
        for alpha in sorted(alphas, reverse=True)
    }


# --- In every process


def answer(rank: int, world_size: int, args: argparse.Namespace, sets: dict[str, str]) -> None:
    """Scores the candidates in turn, each process its share of the rows; rank 0 writes what is chosen."""
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    try:
        loaded = {name: load_rows(source, *args.plan["split"]) for name, source in sets.items()}
    except ValueError as error:
        raise Refused(str(error)) from error
    for name, data in loaded.items():
        if len(data) <= max(args.plan["rows"][name]):
            raise Refused(f"{sets[name]} has {len(data)} rows, fewer than the run was measured on")
    engine, encoder = load_model(args, f"cuda:{rank}" if torch.cuda.is_available() else "cpu")
    rows = args.plan["rows"]
    rows = {of: [rows[of][i] for i in validation.pick_rows(len(rows[of]), args.limit)] for of in sets}
    outcomes, candidates = {}, first_candidates(args.standing, args.masters)

    def score(names: list[str]) -> bool:
        """Whether the time was enough for all of them: alike on all ranks, as the gathered rows say."""
        for name in names:
            load_mixture(engine.model, candidates[name], args.models)
            found = measure(engine, encoder, loaded, rows, rank, world_size, args, name)
            if found is None:
                return False
            outcomes[name] = found
            if rank == 0:
                print(f"{name}: score {found.score:.2f}", flush=True)
        return True

    complete = score(list(candidates))
    trained = [name for name in outcomes if name != "base"]
    if complete and trained:
        best = max(trained, key=lambda name: outcomes[name].score)
        mixtures = towards_base(best, candidates[best], args.plan["alphas"])
        candidates |= mixtures
        complete = score(list(mixtures))
    if rank == 0:
        conclude(args, candidates, outcomes, complete)


def load_mixture(model, mixture: Mixture, models: dict[str, str]) -> None:
    """In place: captured graphs read fixed addresses. Rounded once, to the type of the model's files."""
    into = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in mix([(Weights(Path(models[one])), part) for one, part in mixture.items()]):
            into[name].copy_(tensor)


def measure(
    engine, encoder, loaded: dict, rows: dict, rank: int, world_size: int, args: argparse.Namespace, name: str
) -> Outcome | None:
    """The Outcome of what the engine holds; None, on all ranks, once the time is up."""
    sets = {}
    for set_name, data in loaded.items():
        try:
            share = validation.evaluate(
                engine, encoder, data, rows=rows[set_name], batch_size=args.batch_size, rank=rank,
                world_size=world_size, num_workers=args.dataloader_num_workers, name=f"{name}, {set_name}",
                interrupted=lambda: time.time() > args.deadline,
            )  # fmt: skip
        except torch.OutOfMemoryError:
            raise Refused(f"--batch_size {args.batch_size} is too much for the GPU: set it lower") from None
        examples = validation.gather_examples(share)
        if len(examples) < len(rows[set_name]):
            return None
        sets[set_name] = rows_right(examples)
    return Outcome(sets)


# --- The choice


def conclude(args: argparse.Namespace, candidates: dict[str, Mixture], outcomes: dict, complete: bool):
    """Chooses, writes the submission where it changes, and says why."""

    out, level, submission = Path(args.out), args.plan["level"], Path(args.plan["submission"])
    stood = "submission" if args.standing else "base"
    if "base" not in outcomes or stood not in outcomes:
        raise Refused(f"the time was over before the base and {submission} were scored: it is what it was")
    chosen, base = choose(outcomes, level), outcomes["base"]
    if chosen != stood:
        write(args, chosen, candidates[chosen], outcomes[chosen])
    scored = {}
    for name, outcome in outcomes.items():
        samples = gains(outcome, base)
        scored[name] = {
            "mixture": candidates[name], "score": outcome.score, "accuracy_pct": outcome.accuracies,
            "gain": outcome.score - base.score, "interval": np.quantile(samples, (0.05, 0.95)).tolist(),
            "confidence": confidence(outcome, base),
        }  # fmt: skip
    result = {
        "why": reason(chosen, stood, scored, level, complete), "submitted": chosen, "level": level,
        "complete": complete, "rows": {name: len(rows) for name, rows in base.sets.items()},
        "candidates": scored, "stands": fingerprint(submission), "inputs": args.inputs,
    }  # fmt: skip
    shown = table(result)
    write_atomically(out / RESULT, f"{json.dumps(result, indent=1)}\n".encode())
    write_atomically(out / TABLE, f"{shown}\n".encode())
    print(f"\n{shown}\n\n{out / TABLE} keeps this table.", flush=True)


def write(args: argparse.Namespace, name: str, mixture: Mixture, outcome) -> None:
    """The mixture becomes the submission, in one step; its record says what it is made of."""

    submission, plan = Path(args.plan["submission"]), args.plan
    record = {"recipe": "base" if name == "base" else "finalize", "mixture": mixture, "score": outcome.score}
    record["sets"] = {one: {"accuracy_pct": accuracy} for one, accuracy in outcome.accuracies.items()}
    before = read_record(submission) or {}
    if before.get("measured_in") == plan["measured_in"]:
        # Should the run go on, this is what it has to beat, on the rows of its own validation.
        record |= {one: before[one] for one in ("measured_in", "baseline")}
        record["score_to_beat"] = before.get("score_to_beat", before["score"])
    weights = mix([(Weights(Path(args.models[one])), part) for one, part in mixture.items()])
    try:
        write_submission(plan["base"], submission, weights, record)
    except (ValueError, OSError) as error:
        raise Refused(f"{name} could not be written ({error}); {submission} is what it was") from error


def reason(chosen: str, stood: str, scored: dict[str, dict], level: float, complete: bool) -> str:
    one, many = scored[chosen], len(scored)
    sentence = f"{chosen} has the highest score of those of {many} candidates that beat the base"
    if chosen == stood:
        kept = "what stood there stays" if chosen == "submission" else "the base stays"
        sentence = f"{kept}: of {many} candidates, none scores higher and is sure enough to beat the base"
        sentence = sentence if many > 1 else f"{kept}: nothing else was scored"
    elif chosen == "base":
        sentence = f"the base takes its place again: of {many} candidates, none beats it"
    sentence += f" (score {one['score']:.2f}"
    if chosen != "base":
        sentence += f", the base {scored['base']['score']:.2f}; higher in {one['confidence']:.1%} of samples"
    sentence += f"; --select_level {level:g})."
    return sentence if complete else f"{sentence} There was no time for the other candidates."


def table(result: dict) -> str:
    """The candidates, the best first; the one that is submitted has a star."""
    scored, sets = result["candidates"], list(result["rows"])
    labels = {name: label(name, one["mixture"]) for name, one in scored.items()}
    width = max(map(len, labels.values()))
    counts = ", ".join(f"{number} of {name}" for name, number in result["rows"].items())
    lines = [f"  {'':{width}}" + "".join(f"{name[:9]:>10}" for name in (*sets, "score", "gain"))]
    lines[0] += f"{'90 % interval':>18}{'beats the base':>17}"
    for name, one in sorted(scored.items(), key=lambda item: -item[1]["score"]):
        numbers = [*(one["accuracy_pct"][of] for of in sets), one["score"], one["gain"]]
        low, high = one["interval"]
        line = f"{'*' if name == result['submitted'] else ' '} {labels[name]:{width}}"
        line += "".join(f"{number:10.2f}" for number in numbers) + f"{f'{low:+.2f} to {high:+.2f}':>18}"
        lines.append(line + (f"{one['confidence']:>16.1%}" if name != "base" else ""))
    return "\n".join([*lines, "", f"On the rows that select ({counts}): {result['why']}"])


def label(name: str, mixture: Mixture) -> str:
    """The submission may be a model that this run has found."""
    return f"submission ({', '.join(mixture)})" if name == "submission" not in mixture else name


# --- The program


def main() -> int:
    args = parse()
    status = Path(args.out) / STATUS
    try:
        nothing = prepare(args)
        if nothing is None:
            write_status(status, "running", "The candidates are scored.", None)
            launch(args, args.plan["sets"], answer)
            result = json.loads((Path(args.out) / RESULT).read_bytes())
            cause, message = "finished" if result["complete"] else "deadline", result["why"]
        else:
            print(f"finalize: {nothing}")
            cause, message = "finished", nothing
        write_status(status, cause, message, 0)
        return 0
    except Refused as refused:
        print(f"finalize: {refused}", file=sys.stderr)
        failure = str(refused)
    except SystemExit as died:  # a process that was killed
        print(died, file=sys.stderr)
        failure = str(died)
    except Exception as error:  # a fault of the code: with its traceback
        write_status(status, "failed", f"{type(error).__name__}: {error}", FAILED)
        raise
    if status.parent.is_dir():
        write_status(status, "failed", failure, FAILED)
    return FAILED


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: no traceback
    sys.exit(main())
