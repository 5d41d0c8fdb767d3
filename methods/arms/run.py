"""Runs arms that differ in the named flags only, side by side, and compares what they learned.

    python methods/arms/run.py --arms objectives --jobs 2 --out methods/demo/runs/arms --machine "2 CPU cores"

Each arm starts from its set's base (the demo's, if it names no other), on the same rows in the same order,
once for each seed. A job is a process of one thread. Finished jobs are not run again: the same command goes
on where it was stopped. A job that fails is shown, and the others go on. OUT/results.json is written anew
after each; report.py makes the tables and plots of it.
"""

import argparse
import contextlib
import ctypes
import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from methods.arms import plan
from methods.arms.plan import ArmSet, Refused
from open_r1.lock import lock

POLL = 0.5  # seconds between two looks at the processes
GRACE = 10.0  # seconds of the wall-clock limit that stay for the end
LAST_LINES = 5  # of a failed job's log


@dataclass
class Job:
    folder: Path
    todo: dict[str, Any]
    process: subprocess.Popen | None = None
    started: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.todo['arm']}, seed {self.todo['seed']}"

    def result(self) -> dict[str, Any] | None:
        path = self.folder / "result.json"
        return json.loads(path.read_text()) if path.exists() else None


# --- what is to be run


def make_jobs(sets: list[ArmSet], args: argparse.Namespace) -> list[Job]:
    """The base, then every arm with every seed: what stands first in the sets is run first, seed after seed
    of an arm. An arm of several sets is run once."""
    shared, study = shared_flags(args), sets[0].study
    about = {
        "max_steps": args.max_steps, "test_limit": args.test_limit, "readout_rows": args.readout_rows,
        "base": str(study.base), "data": str(study.data), "gpu": study.gpu,
    }  # fmt: skip
    jobs = [Job(args.out / "base/seed_0", {"arm": "base", "kind": "base", "seed": 0} | about)]
    known: dict[str, plan.Arm] = {}
    for arms in sets:
        for arm in arms.arms.values():
            if known.setdefault(arm.name, arm) != arm:
                raise Refused(f"arm {arm.name} of {arms.name} is not what another set means by it; rename it")
    for arm in known.values():
        reference = next(arms.reference for arms in sets if arm.name in arms.arms)
        for seed in args.seeds:
            folder = args.out / arm.name / f"seed_{seed}"
            todo = {"arm": arm.name, "kind": arm.kind, "seed": seed} | about
            start = model_of(args.out, arm.after, seed) if arm.after else study.base
            if arm.after:
                todo["after"] = arm.after
            if arm.kind == "sft":
                todo |= budget(arm, args.max_steps, reference)
                todo |= {"column": arm.column, "start": str(start), "sft": study.sft}
            else:
                todo["command"] = plan.command_line(arm, seed, shared, folder / "run", study, start)
            jobs.append(Job(folder, todo))
    return jobs


def budget(arm: plan.Arm, max_steps: int, reference: str) -> dict[str, Any]:
    """Of an arm of SFT."""
    if arm.seconds:
        return {"budget": arm.seconds}
    return {"steps": max_steps} if arm.as_many_rows else {"as_long_as": reference}


def model_of(out: Path, arm: str, seed: int) -> Path:
    """What an arm of SFT has made."""
    return out / arm / f"seed_{seed}/run"


def shared_flags(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "max_steps": args.max_steps, "eval_steps": args.eval_steps, "eval_limit": args.eval_limit,
        "save_steps": args.max_steps,  # the last policy, to be measured
        "per_device_eval_batch_size": args.eval_limit, "patience": args.max_steps,
        "finalize": False, "keep_top": 0,  # an arm of its own
    }  # fmt: skip


def claim(jobs: list[Job], out: Path) -> None:
    """Makes OUT this process's, and writes each job.json. Refused, with nothing written, where a folder holds
    a job with other settings, or something that is no job."""
    texts = {job.folder / "job.json": json.dumps(job.todo, indent=1) for job in jobs}
    for path, text in texts.items():
        if path.exists() and path.read_text() != text:
            raise Refused(f"{path.parent} is of a job with other settings; set another --out")
        if not path.exists() and path.parent.exists() and any(path.parent.iterdir()):
            raise Refused(f"{path.parent} holds something that is no job; set another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock(out / ".lock", f"another run.py works in {out}: wait for it, or set another --out")
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    except OSError as error:
        raise Refused(f"--out {out} cannot be written ({error.strerror}); set another folder") from error
    except ValueError as busy:
        raise Refused(str(busy)) from busy


# --- running them


def run_jobs(jobs: list[Job], args: argparse.Namespace, finished) -> None:
    """At most args.jobs at a time, none that would not end before args.wall seconds are over. `finished` is
    called after each. However it ends, no job is left running."""
    end = args.begin + args.wall - GRACE if args.wall else float("inf")
    took: dict[str, float] = {}  # seconds of an arm's slowest job
    waiting, running = list(jobs), []
    try:
        while waiting or running:
            now = time.monotonic()
            for job in [job for job in running if job.process.poll() is not None or now > end]:
                running.remove(job)
                if end_of(job, now - job.started, now > end):
                    took[job.todo["arm"]] = max(took.get(job.todo["arm"], 0.0), now - job.started)
                finished()
            while len(running) < args.jobs and (job := next_job(waiting, took, args.job_seconds, end - now)):
                waiting.remove(job)
                start(job)
                running.append(job)
            if waiting and not running:
                print(
                    f"not run: {'; '.join(job.name for job in waiting)}: no time, or no reference", flush=True
                )
                return
            time.sleep(POLL)
    finally:
        for job in running:
            kill(job)


def next_job(waiting: list[Job], took: dict[str, float], guess: float, left: float) -> Job | None:
    """The first that can start and would end in the seconds that are `left`: it takes as long as its arm
    took, or the slowest other, or what was guessed. A control waits for its reference, whose time it gets,
    and an arm for the one that it comes after."""
    longest = max((seconds for arm, seconds in took.items() if arm != "base"), default=guess)
    for job in waiting:
        needs = [job.todo[key] for key in ("as_long_as", "after") if key in job.todo]
        arms = job.folder.parents[1]
        ready = all((arms / name / job.folder.name / "result.json").exists() for name in needs)
        if ready and 1.05 * took.get(job.todo["arm"], longest) < left:
            return job
    return None


def start(job: Job) -> None:
    command = [sys.executable, Path(__file__).with_name("job.py"), job.folder]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if not job.todo.get("gpu"):
        environment["CUDA_VISIBLE_DEVICES"] = ""
    print(f"start  {job.name}", flush=True)
    job.started = time.monotonic()
    with (job.folder / "log.txt").open("w") as log:
        job.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            start_new_session=True,  # with all it starts it can be ended
            preexec_fn=end_with_parent,  # also where this process is killed: the next one begins the job anew
        )  # fmt: skip


def end_with_parent() -> None:
    """In a new process: the system kills it when the one that started it ends, however that ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def end_of(job: Job, took: float, out_of_time: bool) -> bool:
    """Says how it ended; whether it ended well."""
    if job.process.poll() is None and out_of_time:
        kill(job)
        print(f"cut    {job.name}: --wall is over; the same command runs it again", flush=True)
        return False
    if job.process.returncode == 0:
        print(f"done   {job.name} in {took:.0f} s", flush=True)
        return True
    log = (job.folder / "log.txt").read_text(errors="replace").replace("\r", "\n")
    print(f"FAILED {job.name} (exit code {job.process.returncode}, {job.folder / 'log.txt'}):", flush=True)
    print("\n".join(f"       {line}" for line in log.splitlines()[-LAST_LINES:]), flush=True)
    return False


def kill(job: Job) -> None:
    """With all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.process.pid, signal.SIGKILL)
    job.process.wait()


# --- what came out


def collect(sets: list[ArmSet], jobs: list[Job], args: argparse.Namespace) -> dict[str, Any]:
    """What report.py reads. An arm whose recorded flags, base or rows are not the reference's is left out,
    and named in `refused`."""
    results = {(job.todo["arm"], job.todo["seed"]): done for job in jobs if (done := job.result())}
    refused = {}
    for arms in sets:
        for (name, seed), done in results.items():
            reference = results.get((arms.reference, seed), {}).get("identity")
            if name in arms.arms and reference and "identity" in done:
                try:
                    plan.refuse_other_material(name, reference, done["identity"], arms)
                except Refused as fault:
                    refused[f"{name}, seed {seed}"] = str(fault)
    kept = [slim(done) for (name, seed), done in results.items() if f"{name}, seed {seed}" not in refused]
    return {
        "about": sets[0].study.about,
        "commit": args.commit or commit(), "date": datetime.date.today().isoformat(), "machine": args.machine,
        "command": f"python methods/arms/run.py {shlex.join(shown_arguments())}",
        "sets": [
            {
                "name": arms.name, "reference": arms.reference, "may_differ": sorted(arms.may_differ),
                "arms": {arm.name: {"what": arm.what, "flags": arm.flags} for arm in arms.arms.values()},
            }
            for arms in sets
        ],
        "max_steps": args.max_steps, "eval_limit": args.eval_limit,
        "missing": [job.name for job in jobs if not job.result()],
        "refused": refused, "results": kept,
    }  # fmt: skip


def slim(done: dict[str, Any]) -> dict[str, Any]:
    """Without what names folders of the machine."""
    places = ("identity", "command", "start", "base", "data")
    return {key: value for key, value in done.items() if key not in places}


def shown_arguments() -> list[str]:
    """The arguments, with paths below the project as they are given and others by their last part."""
    return [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]


def commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def write_results(sets: list[ArmSet], jobs: list[Job], args: argparse.Namespace) -> dict[str, Any]:
    collected = collect(sets, jobs, args)
    part = args.out / "results.json.part"
    part.write_text(json.dumps(collected) + "\n")
    part.rename(args.out / "results.json")
    return collected


def draw_data(study: plan.Study) -> None:
    if not study.data.exists():
        part = study.data.with_name("data.part")
        command = [sys.executable, study.recipe.with_name("draw.py"), "--out", part]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)})
        part.rename(study.data)


def one_study(sets: list[ArmSet]) -> plan.Study:
    """Raises Refused where sets have nothing in common, or their base is not there."""
    study = sets[0].study
    for arms in sets[1:]:
        if arms.study != study:
            raise Refused(f"{arms.name} is of another study than {sets[0].name}; run it with another --out")
    if not study.base.exists():
        raise Refused(f"{study.base} does not exist; {study.recipe.parent}/README.md says how it is made")
    return study


def check(args: argparse.Namespace) -> None:
    """Raises Refused for numbers that no job can be run with."""
    for name in ("jobs", "test_limit", "wall", "job_seconds"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise Refused(f"--{name} {value}: set a number above 0")
    if args.readout_rows and args.readout_rows < 4:
        raise Refused(f"--readout_rows {args.readout_rows}: set 0, or 4 or more: the probes take a share")
    if len(set(args.seeds)) < len(args.seeds) or min(args.seeds) < 0:
        raise Refused(f"--seeds {' '.join(map(str, args.seeds))}: set different numbers, 0 or more")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--arms", nargs="+", required=True, help="sets of arms: names in methods/arms/sets, or files")
    add("--only", nargs="+", help="of these, the arms to run (default: all)")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--jobs", type=int, default=os.cpu_count(), help="processes at a time, each of one thread")
    add("--max_steps", type=int, default=120, help="updates of an arm")
    add("--eval_steps", type=int, default=20, help="updates between two validations")
    add("--eval_limit", type=int, default=100, help="validation rows of each set while training")
    add("--test_limit", type=int, help="rows of each test set (default: all 500)")
    add("--readout_rows", type=int, default=200, help="rows of test_val that the readouts use; 0: none")
    add("--wall", type=float, help="seconds within which everything has ended")
    add("--job_seconds", type=float, default=150, help="what a job takes, until some have shown it")
    add("--machine", default="unknown", help="what it runs on, in words, for the report")
    add("--commit", help="of the code, where it lies without git")
    add("--out", type=Path, default=plan.DEMO / "runs/arms", help="folder for jobs and results.json")
    return parser.parse_args()


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not at once: the jobs end first
    args = parse()
    args.out = args.out.resolve()
    args.begin = time.monotonic()
    try:
        check(args)
        sets = [plan.load_set(name) for name in args.arms]
        if unknown := set(args.only or ()) - {"base"}.union(*(arms.arms for arms in sets)):
            raise Refused(f"--only {sorted(unknown)[0]} is no arm of {' '.join(args.arms)}")
        draw_data(one_study(sets))
        for arms in sets:
            plan.check_flags(arms, shared_flags(args))
        jobs = make_jobs(sets, args)
        if args.only:
            jobs = [job for job in jobs if job.todo["arm"] in (*args.only, "base")]
        claim(jobs, args.out)
    except Refused as refused:
        print(f"run.py: {refused}", file=sys.stderr)
        return 2
    run_jobs([job for job in jobs if not job.result()], args, lambda: write_results(sets, jobs, args))
    collected = write_results(sets, jobs, args)
    for name, why in collected["refused"].items():
        print(f"refused {name}: {why}")
    print(f"{len(collected['results'])} of {len(jobs)} jobs are done: {args.out / 'results.json'}")
    return 1 if collected["missing"] or collected["refused"] else 0


if __name__ == "__main__":
    sys.exit(main())
