"""What a run's data set is like, without an example of it: what a node with data of its own has to agree with."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from piecework.federated_data.datasets import ArrayDataset
from piecework.federated_data.sources import DatasetError


class DataCard(BaseModel):
    """An example's shape on disk and type, the classes by number, the vocabulary of texts (else 0), and the scaling."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    shape: list[int] = Field(min_length=1, max_length=3)
    dtype: str
    num_classes: int = Field(ge=1)
    class_names: list[str]
    vocabulary: int = Field(ge=0)
    mean: list[float]
    std: list[float]


def card_of(data: ArrayDataset) -> DataCard:
    """Return the card of a data set."""
    return DataCard(
        shape=list(data.stored_shape),
        dtype=str(data.inputs.dtype),
        num_classes=data.num_classes,
        class_names=list(data.class_names),
        vocabulary=data.vocabulary,
        mean=list(data.mean),
        std=list(data.std),
    )


def read_card(values: Mapping[str, Any], where: str) -> DataCard:
    """Return the card in a mapping. Raises DatasetError, which names the field that is wrong."""
    try:
        return DataCard.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        raise DatasetError(
            f"{where} is no card of a data set: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from None


def require_like(data: ArrayDataset, card: DataCard, whose: str = "this node's data") -> None:
    """Raise DatasetError unless a model for data of this card reads these data, and means the same classes."""
    own = card_of(data)
    remedy = "make the folder by `piecework own-data --like`, with the run's card"
    for what, mine, theirs in (
        ("examples of shape", "x".join(map(str, own.shape)), "x".join(map(str, card.shape))),
        ("values of type", own.dtype, card.dtype),
        ("classes:", own.num_classes, card.num_classes),
    ):
        if mine != theirs:
            raise DatasetError(f"{whose} have {what} {mine}, and the run's {theirs}: {remedy}")
    if own.vocabulary > card.vocabulary:
        raise DatasetError(
            f"{whose} have tokens up to {own.vocabulary - 1}, and the run's model knows {card.vocabulary - 1}"
        )
    if own.class_names and card.class_names and own.class_names != card.class_names:
        number = next(n for n, (a, b) in enumerate(zip(own.class_names, card.class_names, strict=True)) if a != b)
        raise DatasetError(
            f"class {number} of {whose} is {own.class_names[number]!r}, and the run's is {card.class_names[number]!r}: {remedy}"
        )


def number_classes(data: ArrayDataset, labels: np.ndarray, card: DataCard) -> np.ndarray:
    """Return labels [N] as the run numbers them: by the names of classes where both have these. Raises DatasetError."""
    if data.class_names and card.class_names:
        unknown = set(data.class_names) - set(card.class_names)
        if unknown:
            raise DatasetError(
                f"class {min(unknown)!r} is none of the run's, which are {', '.join(card.class_names[:10])}"
            )
        numbers: np.ndarray = np.array([card.class_names.index(name) for name in data.class_names], dtype=np.int64)[
            labels
        ]
        return numbers
    if data.num_classes > card.num_classes:
        raise DatasetError(
            f"labels go up to {data.num_classes - 1}, and the run has {card.num_classes} classes, from 0"
        )
    return np.asarray(labels)
