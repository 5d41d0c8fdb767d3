"""Score a model as the grader does, on the visible validation sets.

    python selfcheck.py                          # $SUBMISSION (or /app/submission) on $VAL and $OOD_VAL
    python selfcheck.py --model DIR --data DIR [DIR…] [--limit N] [--engine fast|transformers] [--out DIR]

It prints a table, and writes selfcheck.json and a JSONL file of each set (one line a row) into --out.
Validation in training runs the same code. Exit code 2 and one sentence: the model or the data cannot be used.
"""

import argparse
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from open_r1.versions import find_faults, refusal

ROOT = Path(__file__).resolve().parent


class Refused(Exception):
    """One sentence for the user; exit code 2."""


def use_project_python() -> None:
    """Where the running Python lacks the packages, start again with the project's own."""
    missing, outside = find_faults()
    own = ROOT / ".venv"
    if (missing or outside) and (own / "bin/python").exists() and Path(sys.prefix).resolve() != own.resolve():
        os.execv(own / "bin/python", [str(own / "bin/python"), __file__, *sys.argv[1:]])
    if missing:
        lacks = f"this Python lacks {', '.join(missing)}"
        raise Refused(f"{lacks}: run `bash test.sh` or `bash train.sh`, which set up .venv.")
    if outside:
        raise Refused(refusal(outside))


def parse(words: list[str] | None = None) -> argparse.Namespace:
    env = os.environ.get
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=env("SUBMISSION") or "/app/submission", help="folder of the model")
    parser.add_argument(
        "--data",
        nargs="+",
        default=[env("VAL") or "/app/data/val", env("OOD_VAL") or "/app/data/ood_val"],
        help="folders of the data sets",
    )
    parser.add_argument(
        "--split", default="test", help="of sets that have several, as --dataset_test_split (default: test)"
    )
    parser.add_argument("--limit", type=int, help="rows of each set, evenly spaced over it (default: all)")
    parser.add_argument(
        "--report_rows",
        metavar="FILE",
        help="only the rows that this file of open_r1/selection.py leaves for reporting",
    )
    parser.add_argument(
        "--engine",
        choices=("fast", "transformers"),
        default="fast",
        help="fast: all rows of a batch together; transformers: model.generate, row by row, as the grader",
    )
    parser.add_argument("--out", default="selfcheck", help="folder for the results (default: ./selfcheck)")
    parser.add_argument("--batch_size", type=int, default=64, help="rows answered together (fast engine)")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="auto: the model's"
    )
    parser.add_argument("--num_processes", type=int, help="default: one per visible GPU, or one on the CPU")
    parser.add_argument("--dataloader_num_workers", type=int, default=2, help="per process, to encode images")
    return parser.parse_args(words)


def name_sets(folders: list[str]) -> dict[str, str]:
    """{name: folder}; the name is the folder's own, with a number when it is taken."""
    sets: dict[str, str] = {}
    for folder in folders:
        base = name = Path(os.path.abspath(folder)).name
        number = 2
        while name in sets or name == "score":  # selfcheck.json keeps that key for the mean
            name, number = f"{base}_{number}", number + 1
        sets[name] = folder
    return sets


def check_paths(args: argparse.Namespace, sets: dict[str, str]) -> None:
    """What can be refused before anything is loaded."""
    if not os.path.isdir(args.model):
        raise Refused(f"the model folder {args.model} does not exist: set --model or SUBMISSION.")
    for folder in sets.values():
        if not os.path.exists(folder):
            raise Refused(f"the data folder {folder} does not exist: set --data, or VAL and OOD_VAL.")
    for name in ("limit", "batch_size", "num_processes"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise Refused(f"--{name} {getattr(args, name)}: set it to 1 or more.")
    if args.dataloader_num_workers < 0:
        raise Refused(f"--dataloader_num_workers {args.dataloader_num_workers}: set it to 0 or more.")
    out, model = Path(args.out).resolve(), Path(args.model).resolve()
    if out == model or model in out.parents:
        raise Refused(f"--out {args.out} is inside the model folder: results must not change a submission.")
    strangers = [name for name in sets if (out / f"{name}.jsonl").exists()]
    if strangers and not (out / "selfcheck.json").exists():
        raise Refused(f"{args.out} holds a {strangers[0]}.jsonl that is not selfcheck's: set another --out.")


def launch(args: argparse.Namespace, sets: dict[str, str], job: Callable) -> None:
    """job(rank, processes, args, sets) in one process for each GPU, or in this one alone."""
    import torch
    import torch.multiprocessing as mp

    gpus = torch.cuda.device_count()
    processes = args.num_processes or max(1, gpus)
    if gpus and processes > gpus:
        raise Refused(f"--num_processes {processes}: there are {gpus} GPUs; set it to at most that.")
    several = "es" if processes > 1 else ""
    print(f"Scoring {args.model} on {', '.join(sets)} in {processes} process{several}", flush=True)
    if processes == 1:
        return job(0, 1, args, sets)
    # Its "Terminating process" would stand beside the sentence that says why.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as meeting:
        try:
            mp.spawn(work, (processes, job, args, sets, meeting), nprocs=processes)
        except (mp.ProcessExitedException, mp.ProcessRaisedException) as end:  # spawn has ended the others
            reason = Path(meeting, "refusal")
            if reason.exists():
                raise Refused(reason.read_text()) from None
            if isinstance(end, mp.ProcessRaisedException):
                raise
            cure = "if the machine ran out of memory, set --num_processes lower"
            sys.exit(f"{Path(sys.argv[0]).stem}: {end}; {cure}.")


def work(
    rank: int, world_size: int, job: Callable, args: argparse.Namespace, sets: dict[str, str], meeting: str
) -> None:
    """One of several processes. `meeting` is a folder that they share."""
    import torch.distributed as dist

    # A spawned process spawns its own in turn, and each would import torch anew. Image workers are forked.
    multiprocessing.set_start_method("fork", force=True)
    dist.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=rank, world_size=world_size)
    try:
        job(rank, world_size, args, sets)
    except Refused as refused:
        Path(meeting, "refusal").write_text(str(refused))
        sys.exit(2)
    dist.destroy_process_group()


def answer(rank: int, world_size: int, args: argparse.Namespace, sets: dict[str, str]) -> None:
    """Answers this process's share of every set; rank 0 prints and writes the results of all."""
    import torch

    from open_r1 import selection, validation

    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    loaded = load_sets(sets, args.split)
    try:
        selection.refuse_strange(args.report_rows, sets.values())
    except ValueError as error:
        raise Refused(str(error)) from error
    engine, encoder = load_model(args, f"cuda:{rank}" if torch.cuda.is_available() else "cpu")
    if rank == 0:
        make_folder(args.out)
    results = {}
    for name, data in loaded.items():
        try:
            share = validation.evaluate(
                engine,
                encoder,
                data,
                rows=selection.rows_of(args.report_rows, sets[name], len(data), args.limit, "report"),
                batch_size=args.batch_size if args.engine == "fast" else 1,
                rank=rank,
                world_size=world_size,
                num_workers=args.dataloader_num_workers,
                name=name,
            )
        except ValueError as error:  # a DataError too
            raise Refused(str(error)) from error
        except torch.OutOfMemoryError:
            raise Refused(f"--batch_size {args.batch_size} is too much for the GPU: set it lower.") from None
        results[name] = validation.gather_examples(share)
    if rank == 0:
        dtype = str(engine.model.dtype).removeprefix("torch.")
        summaries = {name: validation.summarize(examples) for name, examples in results.items()}
        how = {"model": args.model, "engine": args.engine, "dtype": dtype, "limit": args.limit}
        report = {name: summary | how | {"data": sets[name]} for name, summary in summaries.items()}
        report["score"] = validation.score(summaries.values())
        Path(args.out, "selfcheck.json").write_text(json.dumps(report, indent=2) + "\n")
        for name, examples in results.items():
            lines = [json.dumps(asdict(example), ensure_ascii=False) + "\n" for example in examples]
            Path(args.out, f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"\n{args.model}, {args.engine} engine, {dtype}\n\n{validation.format_table(summaries)}\n")
        print(f"{args.out} holds selfcheck.json and a JSONL file of each set, one line a row.")


def make_folder(folder: str) -> None:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"--out {folder} cannot be made ({error.strerror}): set another.") from error


def load_sets(sets: dict[str, str], split: str) -> dict:
    from open_r1.data import DataError, load_rows

    loaded = {}
    for name, folder in sets.items():
        try:
            loaded[name] = load_rows(folder, split)
        except DataError as error:
            raise Refused(str(error)) from error
        except Exception as error:  # the libraries' own, for files that are damaged or empty
            raise Refused(f"the data folder {folder} cannot be read ({first_line(error)}).") from error
        if not len(loaded[name]):
            raise Refused(f"the data folder {folder} has no rows.")
    return loaded


def load_model(args: argparse.Namespace, device: str):
    """The engine and the encoder."""
    import torch
    import transformers

    from open_r1.checkpoint import load_policy
    from open_r1.data import PromptEncoder
    from open_r1.processor import load_processor
    from open_r1.rollout import FastEngine, TransformersEngine

    transformers.logging.set_verbosity_error()  # it warns of a generation_config that every Qwen2-VL has
    dtype = args.dtype if args.dtype == "auto" else getattr(torch, args.dtype)
    try:
        model = load_policy(args.model, dtype, device)
    except ValueError as error:
        fault = str(error).partition("; set MODEL")[0]  # the variable of training
        raise Refused(f"{fault}: set --model or SUBMISSION to a whole Qwen2-VL.") from error
    try:
        processor = load_processor(args.model)
    except Exception as error:  # the processor's files can be wrong in as many ways as there are files
        raise Refused(f"{args.model} has no processor that loads ({first_line(error)}).") from error
    try:
        engine = {"fast": FastEngine, "transformers": TransformersEngine}[args.engine](model, processor)
    except ValueError as error:
        raise Refused(str(error)) from error
    return engine, PromptEncoder(processor, model.config, prompt_mix=0, keep_images=False, seed=0)


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def main() -> int:
    args = parse()
    try:
        use_project_python()
        sets = name_sets(args.data)
        check_paths(args, sets)
        launch(args, sets, answer)
    except Refused as refused:
        print(f"selfcheck: {refused}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: no traceback
    sys.exit(main())
