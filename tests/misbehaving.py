"""Reward functions that go wrong on one of several processes only, named by dotted path."""

import os
import time

calls = [0]


def on_rank_1(completion_ids, **kwargs):
    """Well behaved when it is tried and in the first rollout; then rank 1 raises, then it hangs."""
    calls[0] += 1
    rollout = calls[0] - (2 if os.environ["RANK"] == "0" else 0)  # rank 0 tried it on gold and empty text
    if os.environ["RANK"] == "1" and rollout == 2:
        raise KeyError("colour")
    while os.environ["RANK"] == "1" and rollout > 2:
        time.sleep(0.1)
    return [sum(ids) % 7 / 7 for ids in completion_ids]
