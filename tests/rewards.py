"""Reward functions of the tests, named by dotted path."""


def letters(completion_ids, **kwargs):
    """Differs within most groups, whatever a random model says."""
    return [sum(ids) % 7 / 7 for ids in completion_ids]
