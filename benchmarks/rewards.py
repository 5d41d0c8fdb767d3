"""The reward of all measurements."""


def all_different(completions: list, **kwargs) -> list[float]:
    """Neighbours differ, so no group has zero variance: such a group leaves the product's packed row, and the
    two sides would do different work."""
    return [float(number % 7) for number, _ in enumerate(completions)]
