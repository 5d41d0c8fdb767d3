"""Reward functions of the tests, named by dotted path."""

import os

_calls = []


def letters(completion_ids, **kwargs):
    """Differs within most groups, whatever a random model says."""
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def letters_on_a_full_disk(completion_ids, **kwargs):
    """From the second rollout on the disk of OUT is full; before come two calls for the gold answers."""
    _calls.append(1)
    if len(_calls) == 4:
        with open(os.path.join(os.environ["OUT"], "somebodys.bin"), "wb", buffering=0) as file:
            try:
                while file.write(b"x" * 4096):
                    pass
            except OSError:
                pass
    return letters(completion_ids)
