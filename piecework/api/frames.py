"""Rows as pandas frames."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas


def make_frame(rows: Sequence[dict[str, Any]]) -> "pandas.DataFrame":
    """Return a frame with a line a row; a row's tables become columns `table.name`. Raises ImportError without pandas."""
    try:
        import pandas
    except ImportError:
        raise ImportError("to_pandas needs pandas, which is not installed: pip install 'piecework[report]'") from None
    return pandas.json_normalize(list(rows))


def choose_rows(what: str, known: dict[str, Sequence[dict[str, Any]]]) -> Sequence[dict[str, Any]]:
    """Return the rows of one of several names. Raises ValueError for another name."""
    if what not in known:
        raise ValueError(f"to_pandas({what!r}): expected one of {', '.join(map(repr, known))}")
    return known[what]
