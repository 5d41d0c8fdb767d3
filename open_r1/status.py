"""What became of a run: OUT/status.json, and what train.sh makes of it.

    python open_r1/status.py OUT SINCE CODE

prints how the run in OUT ended and exits with the run's own exit code: launchers return 1 for everything.

    python open_r1/status.py OUT SINCE smaller TRY

prints the flags, if there are any, with which a run that ended for want of memory is started again, for the
first and for the second time.

Rank 0 writes status.json, each rank that fails of itself status-rankN.json; a rank that is
out of memory writes both. SINCE (seconds since 1970)
leaves out what an earlier run wrote, CODE is the launcher's. Only the standard library is imported.
"""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

# Exit codes; a signal's is 128 + its number.
FAILED, NOT_FINITE, REWARD, DIED, NO_MEMORY = 1, 65, 66, 67, 68
OUT_OF_MEMORY = "out_of_memory"  # the cause
BY_SIGNAL = [128 + number for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)]
# The errors of ranks that were talking to one that died.
PEER = re.compile(r"closed by peer|reset by peer|Broken pipe|NCCL|ProcessGroup|process group|TCPStore")
AGAIN = "The same command goes on from the newest complete checkpoint."


def write_status(path: Path, cause: str, message: str, exit_code: int | None, **more) -> None:
    """`path` holds the old status or the new one, whatever happens; on a full disk it is the old one. Ranks
    that run out of memory at the same time write to files of their own first: the last one stays."""
    status = {"cause": cause, "message": message, "exit_code": exit_code, "time": time.time(), **more}
    temporary = path.with_name(f".{path.name}.{more.get('rank', 0)}.tmp")
    try:
        temporary.write_text(json.dumps(status) + "\n")
        os.replace(temporary, path)
    except OSError as error:
        print(f"{path} cannot be written ({error.strerror}): {message}", flush=True)


def ending(out: Path, since: float, code: int) -> tuple[str, int]:
    """The last line about the run in `out` and its exit code, given what the launcher returned."""
    run, *failures = [
        status if (status := _read(path)) and status["time"] >= since else None
        for path in (out / "status.json", *out.glob("status-rank*.json"))
    ]
    stopped = f"Stopped by {signal.Signals(code - 128).name}" if code in BY_SIGNAL else None
    if run is None and stopped:
        return f"{stopped} before the run began: nothing was written.", code
    if run is None:
        return ("" if code == 0 else "The run ended before its first update; the reason stands above."), code
    if run["cause"] != "running":
        return run["message"], run["exit_code"]
    own = [failure for failure in failures if failure and not PEER.search(failure["message"])]
    if own:
        first = min(own, key=lambda failure: failure["time"])
        return f"Rank {first['rank']} failed: {first['message']} {AGAIN}", first["exit_code"]
    if stopped:
        return f"{stopped}, at once. {AGAIN}", code
    return (
        "A process died without a word: killed by hand, for want of memory, or stuck in a reward function "
        f"(the lines above show where). {AGAIN}"
    ), DIED


def smaller(out: Path, since: float, attempt: int) -> list[str]:
    """The flags for attempt 1 or 2 to go on with smaller rows; none where the run did not end for want of
    memory, or nothing is left to lower."""
    status = _read(out / "status.json")
    if not status or status["time"] < since or status["cause"] != OUT_OF_MEMORY:
        return []
    return next(iter(status["smaller"][attempt - 1 :] or status["smaller"][-1:]), [])


def _read(path: Path) -> dict | None:
    try:
        status = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):  # none, or not ours
        return None
    return status if isinstance(status, dict) and {"cause", "time"} <= status.keys() else None


def main() -> int:
    out, since, code, *attempt = sys.argv[1:]
    if attempt:
        print("\n".join(smaller(Path(out), float(since), int(*attempt))))
        return 0
    line, code = ending(Path(out), float(since), int(code))
    if line and code:
        print(f"train.sh: exit code {code}: {line}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
