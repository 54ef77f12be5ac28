"""The papers' tables beside what Piecework computes; `python -m benchmarks.tables` writes docs/tables.md.

One file a section, with a `text()`: the papers' figures as data, as they are printed, and ours from the rules that `piecework
plan` follows. Nothing is trained or traced, no data set is needed.
"""
