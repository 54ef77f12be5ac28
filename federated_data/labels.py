"""What is odd about the labels of a data set: too few classes to learn, and classes without examples."""

import numpy as np

from piecework.federated_data.datasets import ArrayDataset, DatasetError

SHOWN = 5  # classes that a remark names


def label_remarks(data: ArrayDataset) -> list[str]:
    """Return remarks for the user on classes that training or test never shows.

    Nothing is known of the parts of an export. Raises DatasetError if all training examples have the same label.
    """
    if data.export is not None:
        return []
    trained, tested = (
        np.bincount(labels, minlength=data.num_classes) > 0 for labels in (data.labels, data.test_labels)
    )
    if np.count_nonzero(trained) < 2:
        raise DatasetError(
            f"all {len(data.labels)} training examples of {data.name} have the label {_name_classes(data, trained)}: there is "
            "nothing to learn; give examples of at least two classes"
        )
    found = []
    if unseen := _name_classes(data, tested & ~trained):
        share = np.isin(data.test_labels, np.flatnonzero(~trained)).mean()
        found.append(
            f"no training example of {data.name} has the test labels {unseen}: {share:.1%} of the test examples will be wrong"
        )
    if skipped := _name_classes(data, ~trained & ~tested):
        found.append(
            f"no example of {data.name} has the labels {skipped}, although labels go up to {data.num_classes - 1}: the model "
            "has an output for each; number the classes from 0 without gaps"
        )
    return found


def _name_classes(data: ArrayDataset, chosen: np.ndarray) -> str:
    """Return the chosen classes as text, with their names if they have some; the first ones if there are many."""
    classes = np.flatnonzero(chosen).tolist()
    names = [f"{k} ({data.class_names[k]})" if data.class_names else str(k) for k in classes[:SHOWN]]
    return ", ".join(names) + (f" and {len(classes) - SHOWN} more" if len(classes) > SHOWN else "")
