"""What one rank does and all ranks have to know."""

from collections.abc import Callable, Iterator
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object


def on_rank_zero(action: Callable[[], Any]) -> Any:
    """Run `action` on rank 0; its value, or what it raised, on all ranks: none waits for one that failed."""
    outcome = [None, None]
    if PartialState().is_main_process:
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = error
    broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def first_of_ranks(value: Any) -> Any:
    """The first value of all ranks, in their order, that is not None; a collective."""
    return next((one for one in gather_object([value]) if one is not None), None)


def write_along(tensors: Iterator, write: Callable[[Iterator], None]) -> Exception | None:
    """Rank 0 hands `tensors` to `write`; the other ranks run through them, since to gather one is collective,
    and so does rank 0 where `write` fails. What it raised, on all ranks; a collective."""
    error = None
    if PartialState().is_main_process:
        try:
            write(tensors)
        except Exception as raised:
            error = raised
    for _ in tensors:
        pass
    return first_of_ranks(error)
