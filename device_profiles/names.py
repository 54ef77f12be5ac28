"""What a misspelt name may have meant. This lowest package has it because all others name things."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'resnet18'?` for the end of an error message, or an empty text if no known name is close.

    Capitals, and hyphens in the place of underscores, do not count.
    """
    names = list(known)
    folded = {fold_name(name): name for name in reversed(names)}  # of two alike, the first stays
    near = get_close_matches(fold_name(word), folded, n=1)
    return f"; did you mean {folded[near[0]]!r}?" if near else ""


def fold_name(name: str) -> str:
    """Return a name without capitals and underscores."""
    return name.strip().lower().replace("_", "-")
