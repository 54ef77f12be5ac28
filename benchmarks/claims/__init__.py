"""Claims of papers about which system is ahead where, and the harness that judges them by runs of one rule.

A claim is a file NAME.toml here (definition.py). Its runs are ordinary ones (jobs.py, runner.py), whose figures are kept as
docs/claims/NAME.json (records.py).
"""
