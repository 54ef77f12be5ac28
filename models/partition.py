"""Cut a cascade into consecutive pieces that each fit a budget.

A piece is a tuple of atom numbers in order. The caller supplies its cost: a traced step, a table from the server, or a paper's
formula.
"""

from collections.abc import Callable, Iterable, Sequence

from piecework.models.cascade import Blueprint

Piece = tuple[int, ...]
Cost = Callable[[Piece], int | None]  # bytes of training the piece; None = cost not listed, so it may not be trained


class AtomTooLargeError(ValueError):
    """A single atom does not fit its budget, so no cut into pieces exists."""

    def __init__(self, name: str, needed: int | None, allowed: int) -> None:
        self.name, self.needed, self.allowed = name, needed, allowed
        cost = "more than any cost listed" if needed is None else f"{needed:,} bytes"
        super().__init__(
            f"atom {name!r} needs {cost}, the budget allows {allowed:,} bytes: raise the budget, or lower training.batch-size"
        )


def greedy_partition(atoms: Sequence[int], cost: Cost, allowed: int, names: Sequence[str]) -> list[Piece]:
    """Return consecutive pieces of `atoms`, each as long as `allowed` bytes permit.

    This is FedProphet's Algorithm 1 and FeDepth's section 4.1. A longer piece is assumed to cost no less. Raises
    AtomTooLargeError, with the atom's name from `names`, if an atom alone does not fit.
    """
    left, pieces = tuple(atoms), list[Piece]()
    while left:
        if not fits(needed := cost(left[:1]), allowed):
            raise AtomTooLargeError(names[left[0]], needed, allowed)
        pieces.append(longest_start(left, lambda piece: fits(cost(piece), allowed)))
        left = left[len(pieces[-1]) :]
    return pieces


def longest_start(atoms: Piece, works: Callable[[Piece], bool]) -> Piece:
    """Return the longest run of atoms from the first on for which `works` holds.

    The first atom must work, and a longer run must be harder. The search doubles, then halves, because `works` may need a
    trace.
    """
    low, high = 1, 2
    while high <= len(atoms) and works(atoms[:high]):
        low, high = high, 2 * high
    high = min(high, len(atoms) + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(atoms[:middle]) else (low, middle)
    return atoms[:low]


def exclude_input_side(atoms: Sequence[int], cost: Cost, allowed: int) -> list[int]:
    """Return the atoms without those on the input side that do not fit alone (FeDepth's partial training, section 4.2).

    The last atom always stays: a model whose output side does not fit cannot be trained at all.
    """
    return [atom for atom in atoms if atom == atoms[-1] or fits(cost((atom,)), allowed)]


def fits(needed: int | None, allowed: int) -> bool:
    """Return whether a cost is within the budget; an unknown cost (None) is not."""
    return needed is not None and needed <= allowed


def atom_names(blueprint: Blueprint) -> list[str]:
    """List the readable names of the atoms in order."""
    return [atom.name for atom in blueprint.atoms]


def format_ranges(atoms: Iterable[int]) -> str:
    """Format atoms as ranges: (0, 4, 5, 6) -> `0,4-6`."""
    spans: list[list[int]] = []
    for atom in atoms:
        if spans and atom == spans[-1][1] + 1:
            spans[-1][1] = atom
        else:
            spans.append([atom, atom])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
