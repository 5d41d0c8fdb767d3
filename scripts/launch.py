"""`accelerate launch` without its own traceback: a process that fails has said why, and it stays in sight."""

import sys

from accelerate.commands.launch import main
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

try:
    main()
except ChildFailedError as error:
    rank, failure = error.get_first_failure()
    sys.exit(f"launch.py: process {rank} ended first, with exit code {failure.exitcode}")
except SignalException as stop:
    sys.exit(f"launch.py: stopped by {stop.sigval.name}")
