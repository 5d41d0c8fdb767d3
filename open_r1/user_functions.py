"""Functions that a user names in a flag, and their parameters that another flag sets."""

import importlib
import inspect
import json
import math
from collections.abc import Callable, Collection
from typing import Any

KINDS = {  # of an option's default: what its value may be, in types and words
    bool: ((bool,), "true or false"),
    int: ((int, float), "a number"),
    float: ((int, float), "a number"),
}


def find_function(name: str, registry: dict[str, Callable], flag: str = "--reward_funcs") -> Callable:
    """Of the registry, or at a dotted path (package.module.function). ValueError says what there is."""
    if name in registry:
        return registry[name]
    known = f"known names are {', '.join(sorted(registry))}; others are dotted paths (my_module.my_function)"
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ValueError(f"{flag} {name} is no known function: {known}")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the module does when it is imported
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{flag} {name} could not be imported ({reason}): {known}") from error
    if not callable(function):
        raise ValueError(f"{flag} {name} is a {type(function).__name__}, no function: {known}")
    return function


def option_value(function: Callable, parameter: str, value: str, given: Collection[str], shown: str) -> Any:
    """The value of a parameter that has a default and is not `given` by the trainer: JSON (7.0, true, null),
    or else text, of the default's kind. ValueError, beginning with `shown`, says which there are."""
    known = {
        key: one.default
        for key, one in inspect.signature(function).parameters.items()
        if one.default is not inspect.Parameter.empty and key not in given
    }
    if parameter not in known:
        has = f"has {', '.join(known)}" if known else "has no options"
        raise ValueError(f"{shown} {has}")
    try:
        found = json.loads(value)
    except json.JSONDecodeError:
        found = value
    kind = KINDS.get(type(known[parameter]))
    if kind and type(found) not in kind[0]:
        raise ValueError(f"{shown} takes {kind[1]} for {parameter}")
    if isinstance(found, float) and not math.isfinite(found):
        raise ValueError(f"{shown} takes a finite number for {parameter}")
    return found
