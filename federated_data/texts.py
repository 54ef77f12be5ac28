"""Read texts as tokens: numbers of the most frequent words of the training texts.

As in PriSM's authors' code for IMDB, English stop words are dropped and the 1000 most frequent other words are kept. A text is
its first 500 kept words, padded with 0 on the left. scikit-learn, which splits words and knows the stop words, is imported only
when texts are prepared.
"""

import gzip
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from piecework.federated_data.sources import WHERE, DatasetError, Ints, Source, fetch, hold_out_rows, import_extra

WORDS, LENGTH = 1000, 500  # a token is 0, or 1..WORDS by frequency
IMDB_CLASSES = ("neg", "pos")
IMDB_URL = "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
IMDB_MD5 = "7c2ac02c03563afcf9b574c7e56c153a"
Reviews = tuple[Sequence[str], Ints]  # texts, and their labels
OPENERS: dict[str, Callable[..., Any]] = {"": open, ".gz": gzip.open, ".xz": lzma.open}


def imdb(source: Path, download: bool) -> Source:
    """Read 25,000 + 25,000 film reviews, negative 0 or positive 1 (Maas et al., 2011).

    They come from the archive's folder `aclImdb`, or from `imdb/train.jsonl` and `test.jsonl`, plain, .gz or .xz, with one
    object with `text` and `label` per line.
    """
    return _reviews(*_read_imdb(source, download))


def imdb_pooled(source: Path, download: bool) -> Source:
    """Read the reviews of `imdb` and divide all of them anew, as PriSM's authors do: 37,500, and a quarter as test examples."""
    (texts, labels), (others, other_labels) = _read_imdb(source, download)
    texts, labels = [*texts, *others], np.concatenate([labels, other_labels])
    rows, test = hold_out_rows(labels, 0.25)
    parts = (([texts[row] for row in each], labels[each]) for each in (rows, test))
    return _reviews(*parts)


def _read_imdb(source: Path, download: bool) -> tuple[Reviews, Reviews]:
    """Return the published training and test reviews with their labels. Raises DatasetError."""
    folder = source / "aclImdb"
    train, test = (_find_packed(source / "imdb" / f"{part}.jsonl") for part in ("train", "test"))
    if train and test:
        return _read_lines(train), _read_lines(test)
    else:
        if download and not folder.is_dir():
            fetch(IMDB_URL, source, "aclImdb_v1.tar.gz", IMDB_MD5)
        if lost := [part for part in ("train", "test") if not (folder / part).is_dir()]:
            raise DatasetError(
                f"imdb: no {folder / lost[0]}; set data-dir (now {source}) to the folder that holds "
                "aclImdb/{train,test}/{neg,pos}/*.txt or imdb/{train,test}.jsonl (or .gz, .xz), or set data.download = true"
            )
        return _read_folder(folder / "train", IMDB_CLASSES), _read_folder(folder / "test", IMDB_CLASSES)


def _reviews(train: Reviews, test: Reviews) -> Source:
    """Return reviews as tokens."""
    (texts, labels), (test_texts, test_labels) = train, test
    tokens, test_tokens = tokenise(*([re.sub(r"<[^>]*>", " ", text) for text in part] for part in (texts, test_texts)))
    return Source(
        tokens,
        labels,
        test_tokens,
        test_labels,
        len(IMDB_CLASSES),
        vocabulary=WORDS + 1,
        class_names=IMDB_CLASSES,
    )


def text(source: Path, download: bool) -> Source:
    """Read one folder of .txt files (UTF-8) per class, under train/ and test/; without test/, 20 % is held out.

    Classes are numbered in the order of their names.
    """
    if not source.is_dir():
        raise DatasetError(f"no folder {source}; write text:<dir>, {WHERE}")
    root = source / "train" if (source / "train").is_dir() else source
    classes = [entry.name for entry in _folders(root)]
    texts, labels = _read_folder(root, classes)
    if root != source and (source / "test").is_dir():
        if strange := sorted({entry.name for entry in _folders(source / "test")} - set(classes)):
            raise DatasetError(
                f"{source / 'test' / strange[0]} is not a class of the training texts: {', '.join(classes)}"
            )
        test_texts, test_labels = _read_folder(source / "test", classes)
    else:
        rows, test_rows = hold_out_rows(labels)
        test_texts, test_labels = [texts[row] for row in test_rows], labels[test_rows]
        texts, labels = [texts[row] for row in rows], labels[rows]
    tokens, test_tokens = tokenise(texts, test_texts)
    return Source(
        tokens, labels, test_tokens, test_labels, len(classes), vocabulary=WORDS + 1, class_names=tuple(classes)
    )


def tokenise(train: Sequence[str], test: Sequence[str]) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Return tokens [N, LENGTH] of both, with the vocabulary of the training texts.

    Equally frequent words are ordered alphabetically.
    """
    words = import_extra("sklearn.feature_extraction.text").CountVectorizer(stop_words="english").build_analyzer()
    counts = Counter(word for text in train for word in words(text))
    if not counts:
        raise DatasetError(f"{len(train)} training texts have only stop words: there is nothing to learn")
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[:WORDS]
    number = {word: n for n, word in enumerate(ranked, start=1)}
    found = []
    for texts in (train, test):
        rows = np.zeros((len(texts), LENGTH), dtype=np.uint16)
        for row, text in zip(rows, texts, strict=True):
            tokens = [number[word] for word in words(text) if word in number][:LENGTH]
            row[LENGTH - len(tokens) :] = tokens
        found.append(rows)
    return found[0], found[1]


def text_files(root: Path) -> list[Path]:
    """List every text file under `root`, sorted."""
    return sorted(path for path in root.rglob("*") if path.suffix.lower() == ".txt" and path.is_file())


def _folders(root: Path) -> list[Path]:
    return sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _read_folder(root: Path, classes: Sequence[str]) -> tuple[list[str], Ints]:
    texts, labels = [], []
    for label, name in enumerate(classes):
        if not (files := text_files(root / name)):
            raise DatasetError(f"no .txt in {root / name}; expected train/<class>/* or <class>/*")
        for file in files:
            try:
                texts.append(file.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError) as error:
                raise DatasetError(f"{file} cannot be read as a text: {error}; store it as UTF-8") from None
            labels.append(label)
    if not texts:
        raise DatasetError(f"no class folders in {root}; expected train/<class>/* or <class>/*")
    return texts, np.array(labels, dtype=np.int64)


def _find_packed(path: Path) -> Path | None:
    return next((found for suffix in OPENERS if (found := path.with_name(path.name + suffix)).is_file()), None)


def _read_lines(path: Path) -> tuple[list[str], Ints]:
    """Read texts and labels of JSON lines. Raises DatasetError, which names the damaged line."""
    texts, labels = [], []
    try:
        with OPENERS[path.suffix if path.suffix in OPENERS else ""](path, "rt", encoding="utf-8") as lines:
            for line in lines:
                entry = json.loads(line)
                text, label = entry["text"], entry["label"]
                if not isinstance(text, str) or type(label) is not int or label not in (0, 1):
                    raise ValueError(f"text is {text!r:.40}, label {label!r:.40}")
                texts.append(text)
                labels.append(label)
    except (OSError, EOFError, ValueError, LookupError, TypeError, RecursionError, zlib.error, lzma.LZMAError) as error:
        raise DatasetError(
            f"{path}, after line {len(labels)}: {type(error).__name__}: {error}; expected objects with text and label, 0 or 1"
        ) from None
    if not texts:
        raise DatasetError(f"{path} is empty; expected objects with text and label, 0 or 1, one a line")
    return texts, np.array(labels, dtype=np.int64)
