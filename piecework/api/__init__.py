"""Piecework from Python: plans, runs and comparisons as functions with typed results.

The command line calls the same functions. The package offers them as `piecework.plan`, `piecework.suggest`, `piecework.run`,
`piecework.compare` and `piecework.load`.
"""
