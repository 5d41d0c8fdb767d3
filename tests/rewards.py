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


def half_stuck(completions, completion_ids, answer, entropy, **kwargs):
    """As letters, but the groups of even counts have equal rewards. Asking for the entropy takes a forward
    pass of the policy, for which all ranks must have as many rows."""
    return [0.5 if a % 2 == 0 else one for one, a in zip(letters(completion_ids), answer, strict=True)]
