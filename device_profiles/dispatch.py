"""The base of the modes that see every operator that torch runs."""

from torch.utils._python_dispatch import TorchDispatchMode


class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that does not import torch's compiler, which takes 75 MB and more than a second on a board."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
