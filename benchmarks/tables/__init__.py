"""The papers' tables beside what Piecework computes; `python -m benchmarks.tables` writes docs/results/papers.md.

Each section is a file with a `text()`: the papers' printed figures as data, and ours from the cuts that `piecework plan`
follows. Nothing is trained or traced, and no data set is needed.
"""
