"""A small claim in a file, for tests of the harness."""

from pathlib import Path

from benchmarks.claims import jobs
from benchmarks.claims.definition import Claim

TWO_CASES = """
title = "a"
question = "b"
paper = "c"
gap = "d"
seeds = [1, 2]
last = 2
[search]
rates = [0.02, 0.05, 0.1]
[settings]
clients = 6
"clients-per-round" = 3
"num-rounds" = 8
[[case]]
name = "weak"
settings = { fleet = "reference-step", "data.partition" = "iid" }
[[case]]
name = "skew"
settings = { fleet = "reference-step", "data.partition" = "dirichlet" }
rates-from = "weak"
[[row]]
name = "FeDepth"
settings = { strategy = "fedepth" }
[[row]]
name = "bound"
settings = { strategy = "fedavg", fleet = "unlimited" }
rate = 0.07
seeds = [1]
role = "bound"
[[row]]
name = "ProFL"
settings = { strategy = "profl", "profl.stage-rounds" = 4 }
cases = ["weak"]
rates = [0.01, 0.2]
search = { "profl.stage-rounds" = 1 }
paper = { weak = 71.2 }
[[row]]
name = "m-FeDepth"
settings = { strategy = "m-fedepth" }
cases = ["skew"]
rates-from = "FeDepth"
[[order]]
text = "FeDepth is ahead of the bound"
ahead = "FeDepth"
behind = ["bound"]
cases = ["skew"]
"""


def a_claim(folder: Path, text: str, name: str = "tiny") -> Claim:
    """Write a definition and load it."""
    (folder / f"{name}.toml").write_text(text, encoding="utf-8")
    return jobs.load(name, folder)
