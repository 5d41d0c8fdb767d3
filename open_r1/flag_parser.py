"""The command line's flags as dataclasses; what cannot be read is refused in a sentence."""

import difflib
from collections.abc import Sequence

from trl import TrlParser


class Refused(ValueError):
    """A sentence that names the flag."""


class FlagParser(TrlParser):
    """TrlParser takes `--max_st` for `--max_steps`; train.sh would not know it, and look in other folders."""

    def __init__(self, types: Sequence[type], description: str | None = None):
        super().__init__(types, allow_abbrev=False, description=description)

    def error(self, message: str) -> None:
        """Instead of a page of usage and exit code 2."""
        raise Refused(f"{message} (--help lists all flags)")

    def parse(self, flags: Sequence[str] | None = None) -> tuple:
        """One dataclass for each type. Raises ValueError for flags that do not exist, and for values they
        do not take: argparse looks at some, transformers at others."""
        try:
            *parsed, unknown = self.parse_args_and_config(flags, return_remaining_strings=True)
        except Refused:
            raise
        except Exception as error:  # of many kinds: transformers makes something of the values
            sentence = str(error) if str(error).startswith("--") else f"{type(error).__name__}: {error}"
            raise ValueError(f"a flag's value cannot be used: {sentence}") from error
        if unknown:
            raise ValueError("\n".join(map(self._unknown, _flags_first(unknown))))
        return tuple(parsed)

    def _unknown(self, word: str) -> str:
        if not word.startswith("--"):
            return f"{word!r} belongs to no flag: give --flag value"
        name = word.partition("=")[0].replace("-", "_").replace("__", "--", 1)
        near = difflib.get_close_matches(name, self._option_string_actions, n=1)
        return f"{word} is no flag" + (f": did you mean {near[0]}?" if near else " (--help lists all flags)")


def _flags_first(words: Sequence[str]) -> list[str]:
    """Unknown flags; their values only where there is no flag that they could be of."""
    return [word for word in words if word.startswith("--")] or list(words)
