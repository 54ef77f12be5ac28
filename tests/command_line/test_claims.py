"""Definitions of claims: what is refused, and which runs they stand for, in which order."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from claims_helpers import TWO_CASES, a_claim

from benchmarks.claims import jobs
from benchmarks.claims.definition import Claim, ClaimError
from benchmarks.claims.jobs import Wanted, in_order, searches, wanted
from benchmarks.claims.reading import names
from benchmarks.claims.records import Records, RunRecord, SearchRecord, rounded, thinned
from benchmarks.claims.search import best_rate
from piecework.studies.jobs import slug

Make = Callable[[str], Claim]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return lambda text: a_claim(tmp_path, text)


def test_seeds_are_taken_in_turn_and_searches_come_first(make: Make) -> None:
    claim, weak, skew = make(TWO_CASES), ("weak", "FeDepth"), ("skew", "FeDepth")
    assert searches(claim) == [weak, ("weak", "ProFL")]
    first = [Wanted(*weak, 1, weak), Wanted("weak", "bound", 1, None), Wanted("weak", "ProFL", 1, ("weak", "ProFL"))]
    first += [Wanted(*skew, 1, weak), Wanted("skew", "bound", 1, None), Wanted("skew", "m-FeDepth", 1, weak)]
    second = [Wanted(*weak, 2, weak), Wanted("weak", "ProFL", 2, ("weak", "ProFL"))]
    second += [Wanted(*skew, 2, weak), Wanted("skew", "m-FeDepth", 2, weak)]
    assert wanted(claim) == [first, second]
    assert [found for _, found in in_order([claim])] == [weak, ("weak", "ProFL"), *first, *second]
    apart = make(TWO_CASES.replace('rates-from = "weak"\n', ""))
    own = [
        ("skew", "FeDepth"),
        Wanted(*skew, 1, skew),
        Wanted("skew", "bound", 1, None),
        Wanted("skew", "m-FeDepth", 1, skew),
    ]
    assert [found for _, found in in_order([apart])][:9] == [weak, ("weak", "ProFL"), *first[:3], *own]


def test_a_case_may_have_seeds_of_its_own(make: Make) -> None:
    """Those of a row come first, then those of the case, then those of the claim."""
    claim = make(TWO_CASES.replace('rates-from = "weak"\n', 'rates-from = "weak"\nseeds = [4, 5, 6]\n'))
    places = {(case.name, row.name): claim.seeds_of(case, row) for case, row in claim.places()}
    assert places["weak", "FeDepth"] == (1, 2)
    assert places["skew", "FeDepth"] == places["skew", "m-FeDepth"] == (4, 5, 6)
    assert places["weak", "bound"] == places["skew", "bound"] == (1,)
    assert [[want.seed for want in each if want.case == "skew"] for each in wanted(claim)] == [
        [4, 1, 4],
        [5, 5],
        [6, 6],
    ]
    assert [job.seed for job in jobs.search_jobs(claim, ("skew", "m-FeDepth"))] == [4, 4, 4]


def test_the_seeds_of_a_case_may_be_for_some_rows_only(make: Make) -> None:
    seeds = 'rates-from = "weak"\nseeds = [1, 2, 3]\n'
    claim = make(TWO_CASES.replace('rates-from = "weak"\n', f'{seeds}seeds-for = ["FeDepth"]\n'))
    places = {(case.name, row.name): claim.seeds_of(case, row) for case, row in claim.places()}
    assert places["skew", "FeDepth"] == (1, 2, 3)
    assert places["skew", "m-FeDepth"] == places["weak", "FeDepth"] == (1, 2)
    assert places["skew", "bound"] == (1,)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            'seeds-for = ["FeDepth"]',
            r"case 'skew': seeds = \[\]: with seeds-for, add the other rows' \[1, 2\] to compare",
        ),
        ('seeds = [2, 3]\nseeds-for = ["FeDepth"]', r"case 'skew': seeds = \[2, 3\]: with seeds-for, add"),
        ("seeds = [1, 2]\nseeds-for = []", "case 'skew' seeds-for"),
        ('seeds = [1, 2]\nseeds-for = ["FeDepth", "FeDepth"]', "seeds-for = .*: each must be unique"),
        ('seeds = [1, 2]\nseeds-for = ["bound"]', r"the row 'bound' has seeds of its own, \[1\]: take it out"),
        ('seeds = [1, 2]\nseeds-for = ["ProFL"]', "the row 'ProFL' is not run in this case: take it out"),
        ('seeds = [1, 2]\nseeds-for = ["FeDeph"]', "seeds-for: row 'FeDeph': there is none of this name"),
    ],
)
def test_rows_that_have_no_seeds_of_their_case_are_refused(make: Make, given: str, message: str) -> None:
    with pytest.raises(ClaimError, match=message):
        make(TWO_CASES.replace('rates-from = "weak"\n', f'rates-from = "weak"\n{given}\n'))


def test_a_case_may_have_longer_or_shorter_searches(make: Make) -> None:
    claim = make(TWO_CASES.replace('"iid" }\n', '"iid" }\nsearch-rounds = 5\n'))
    assert {job.settings["num-rounds"] for job in jobs.search_jobs(claim, ("weak", "FeDepth"))} == {5}
    with pytest.raises(ClaimError, match="case 'skew': search-rounds = 5: no rate is searched there"):
        make(TWO_CASES.replace('"dirichlet" }\n', '"dirichlet" }\nsearch-rounds = 5\n'))


@pytest.mark.parametrize("where", ["case 'skew'", "row 'bound'", ""])
def test_a_seed_that_stands_twice_is_refused(make: Make, where: str) -> None:
    text = {
        "case 'skew'": TWO_CASES.replace('rates-from = "weak"\n', 'rates-from = "weak"\nseeds = [4, 4]\n'),
        "row 'bound'": TWO_CASES.replace("seeds = [1]\n", "seeds = [4, 4]\n"),
        "": TWO_CASES.replace("seeds = [1, 2]\n", "seeds = [4, 4]\n"),
    }
    with pytest.raises(ClaimError, match=rf"{where}: seeds = \[4, 4\]: each must be unique"):
        make(text[where])


def test_claims_take_turns_seed_by_seed(make: Make) -> None:
    one, other = make(TWO_CASES), make(TWO_CASES).model_copy(update={"name": "other"})
    order = [(claim.name, getattr(found, "seed", 0)) for claim, found in in_order([one, other], "FeDepth")]
    once = [("tiny", 0), ("tiny", 1), ("tiny", 1), ("other", 0), ("other", 1), ("other", 1)]
    assert order == [*once, ("tiny", 2), ("tiny", 2), ("other", 2), ("other", 2)]


def test_the_runs_of_one_case(make: Make) -> None:
    """The search that they need is of another case."""
    claim, weak, skew = make(TWO_CASES), ("weak", "FeDepth"), ("skew", "FeDepth")
    assert [found for _, found in in_order([claim], "FeDepth", "skew")] == [
        weak,
        Wanted(*skew, 1, weak),
        Wanted(*skew, 2, weak),
    ]
    assert {want.case for each in wanted(claim, of_case="skew") for want in each} == {"skew"}
    assert wanted(claim, "m-FeDepth", "weak") == []


def test_the_runs_of_a_search(make: Make) -> None:
    claim = make(TWO_CASES)
    depth, profl = (jobs.search_jobs(claim, place) for place in searches(claim))
    assert [(job.rate, job.settings["training.lr"], job.settings["num-rounds"], job.seed) for job in depth] == [
        (rate, rate, 3, 1) for rate in (0.02, 0.05, 0.1)
    ]
    assert [job.settings["profl.stage-rounds"] for job in profl] == [1, 1]
    assert [job.rate for job in profl] == [0.01, 0.2]
    run = jobs.job_of(claim, Wanted("weak", "ProFL", 2, None), 0.2)
    assert (run.settings["num-rounds"], run.settings["profl.stage-rounds"], run.settings["seed"]) == (8, 4, 2)
    assert run.label == "tiny: weak: ProFL: seed 2"


def test_a_row_takes_the_rate_that_is_found_elsewhere(make: Make) -> None:
    claim = make(TWO_CASES)
    run = jobs.job_of(claim, Wanted("skew", "m-FeDepth", 1, ("weak", "FeDepth")), 0.05)
    assert (run.rate, run.settings["training.lr"], run.settings["data.partition"]) == (0.05, 0.05, "dirichlet")
    bound = jobs.job_of(claim, Wanted("weak", "bound", 1, None), None)
    assert (bound.rate, bound.settings["training.lr"]) == (0.07, 0.07)
    rates = [job.rate for job in jobs.possible(claim, Wanted("skew", "m-FeDepth", 1, ("weak", "FeDepth")))]
    assert rates == [0.02, 0.05, 0.1]


def test_a_rate_may_be_given_in_one_case(make: Make) -> None:
    """The search stays for others that use it; in the other case the row has what it finds."""
    claim = make(TWO_CASES.replace('name = "FeDepth"\n', 'name = "FeDepth"\nrate-in = { "skew" = 0.3 }\n', 1))
    row, found = claim.row("FeDepth"), 0.05
    rates = [jobs.seed_job(claim, case, row, 1, found).rate for case in claim.cases]
    assert rates == [0.05, 0.3]
    assert [jobs.source_of(claim, case, row) for case in claim.cases] == [("weak", "FeDepth"), None]
    assert ("weak", "FeDepth") in jobs.searches(claim)
    with pytest.raises(ClaimError, match="case 'dark': there is none of this name"):
        make(TWO_CASES.replace('name = "FeDepth"\n', 'name = "FeDepth"\nrate-in = { "dark" = 0.3 }\n', 1))


def test_a_folder_is_named_by_what_the_definition_gives(make: Make, tmp_path: Path) -> None:
    want = Wanted("weak", "bound", 1, None)
    run = jobs.job_of(make(TWO_CASES), want, None)
    assert run.folder(tmp_path) == tmp_path / "tiny" / "weak" / "bound" / f"seed-1-{run.hash}"
    assert re.fullmatch(r"[0-9a-f]{8}", run.hash)
    assert jobs.job_of(make(TWO_CASES.replace('title = "a"', 'title = "b"')), want, None).hash == run.hash
    assert jobs.job_of(make(TWO_CASES.replace("clients = 6", "clients = 7")), want, None).hash != run.hash
    (found,) = [job for job in jobs.search_jobs(make(TWO_CASES), ("weak", "FeDepth")) if job.rate == 0.05]
    assert found.name == f"rate-0.05-{found.hash}"


def test_the_hash_is_of_a_fleets_content(make: Make, tmp_path: Path) -> None:
    file, want = tmp_path / "own.toml", Wanted("weak", "bound", 1, None)
    text = TWO_CASES.replace('fleet = "unlimited"', 'fleet = "own.toml"')
    device = '[[device]]\nname = "a"\nmemory = "1GB"\nflops = 1e9\ndisk-bandwidth = 1e7\n'
    found = []
    for name, memory in (("one", "1GB"), ("two", "1GB"), ("one", "2GB")):
        file.write_text(f'name = "{name}"\nassignment = "blocks"\n{device.replace("1GB", memory)}')
        found.append(jobs.job_of(make(text), want, None).hash)
    assert found[0] == found[1] != found[2]


def test_the_best_rate() -> None:
    assert best_rate({0.02: 0.5, 0.05: 0.7, 0.1: 0.7}) == 0.05
    assert best_rate({0.02: 0.1, 0.05: None}) == 0.02
    assert best_rate({0.02: None}) is None


HEADLINE = '[headline]\nrows = {{ {} = "a" }}\ncases = {{ {} = "b" }}\n[search]'
REFUSED = {
    "settings learning = 1: unknown": ("clients = 6", "clients = 6\nlearning = 1"),
    "row 'FeDepth': case 'weak': unknown setting 'learning'": ('strategy = "fedepth"', 'strategy="fedepth",learning=1'),
    "row 'FeDepth': case 'weak': setting profl.stage-rounds = 4 has no effect here": (
        'strategy = "fedepth"',
        'strategy = "fedepth", "profl.stage-rounds" = 4',
    ),
    "row 'FeDepth' colour: unknown key": ('name = "FeDepth"', 'name = "FeDepth"\ncolour = "red"'),
    "title is missing": ('title = "a"', ""),
    "last = 'three': should be a valid integer": ("last = 2", 'last = "three"'),
    "row 'm-FeDepth': case 'dark': there is none of this name; there are 'weak', 'skew'": ('["skew"]', '["dark"]'),
    "row 'm-FeDepth': rates-from = 'bound', for which no rate is searched": ('from = "FeDepth"', 'from = "bound"'),
    "row 'bound' has rate and rates: give one": ("rate = 0.07", "rate = 0.07\nrates = [1.0, 2.0]"),
    "case 'skew': training.lr is searched": ('"dirichlet"', '"dirichlet", "training.lr" = 0.1'),
    "settings: seed is set by the harness": ("clients = 6", "clients = 6\nseed = 2"),
    "row 'ProFL': rates = [0.01]: give at least two": ("rates = [0.01, 0.2]", "rates = [0.01]"),
    "row 'fedepth' and row 'FeDepth' would both write to the folder 'fedepth'": (
        'name = "m-FeDepth"',
        'name = "fedepth"',
    ),
    "order 1: row 'FedAvg': there is none": ('ahead = "FeDepth"', 'ahead = "FedAvg"'),
    "order 1: the row 'ProFL' has no case 'skew'": ('behind = ["bound"]', 'behind = ["ProFL"]'),
    "headline: row 'FedAvg': there is none": ("[search]", HEADLINE.format("FedAvg", "skew")),
    "headline: cases = ['b', 'b']: each needs a title of its own": (
        "[search]",
        HEADLINE.format("FeDepth", "skew").replace("cases = {", 'cases = { weak = "b",'),
    ),
    "headline: case 'dark': there is none": ("[search]", HEADLINE.format("FeDepth", "dark")),
    "headline: the row 'ProFL' is in none of the cases ['skew']": ("[search]", HEADLINE.format("ProFL", "skew")),
    "headline: the last case, 'weak', whose curves are named, has no row called 'a'": (
        "[search]",
        HEADLINE.format("m-FeDepth", "skew").replace('= "b"', '= "b", weak = "c"'),
    ),
    "headline: case 'skew': rows = ['a', 'a']: each must be unique": (
        "[search]",
        HEADLINE.format("FeDepth", "skew").replace("rows = {", 'rows = { m-FeDepth = "a",'),
    ),
    "its rate is searched with the row 'FeDepth', which has no case 'weak'": (
        'strategy = "fedepth" }',
        'strategy = "fedepth" }\ncases = ["skew"]',
    ),
    "fleet: the device 'raspberry-pi-4' has a disk-latency": ('fleet = "unlimited"', 'fleet = "boards"'),
    "unknown strategy 'fedepht'": ('strategy = "fedepth"', 'strategy = "fedepht"'),
}


@pytest.mark.parametrize("says", REFUSED)
def test_a_wrong_definition_is_refused(says: str, make: Make, tmp_path: Path) -> None:
    old, new = REFUSED[says]
    assert old in TWO_CASES
    with pytest.raises(ClaimError) as error:
        make(TWO_CASES.replace(old, new, 1))
    says = says.replace("settings learning = 1: unknown", "unknown setting 'learning'")
    assert says in str(error.value)
    assert str(tmp_path / "tiny.toml") in str(error.value)


def test_a_claim_that_is_not_there(tmp_path: Path) -> None:
    a_claim(tmp_path, TWO_CASES)
    with pytest.raises(ClaimError, match="there is no claim 'tinny'; the claims are tiny"):
        jobs.load("tinny", tmp_path)
    claims = [jobs.load("tiny", tmp_path)]
    with pytest.raises(ClaimError, match="--only FedAvg: no row has this name; there are 'FeDepth', 'bound'"):
        jobs.require_named(claims, "FedAvg", "")
    with pytest.raises(ClaimError, match=r"--case iid: no case has this name; there are 'weak', 'skew'$"):
        jobs.require_named(claims, "", "iid")
    with pytest.raises(ClaimError, match=r"--only m-FeDepth --case weak: .* is not run in this case, but in 'skew'$"):
        jobs.require_named(claims, "m-FeDepth", "weak")
    jobs.require_named(claims, "m-FeDepth", "skew")


@pytest.mark.parametrize("name", names())
def test_the_definitions_load(name: str) -> None:
    assert jobs.load(name).name == name


def test_names_of_folders() -> None:
    assert [slug(name) for name in ("FeDepth, fitted", "keep 0.2", "  ", "m-FeDepth", "..", ".", "..a")] == [
        "fedepth-fitted",
        "keep-0.2",
        "unnamed",
        "m-fedepth",
        "unnamed",
        "unnamed",
        "..a",
    ]


def a_record(**changes: object) -> RunRecord:
    record = RunRecord(
        **{"case": "weak", "row": "FeDepth", "seed": 2, "rate": 0.05, "hash": "0f3c9a1b", "commit": "abc"},
        **{"machine": "m", "status": "completed", "reason": "", "rounds": 8, "last": 0.123456, "best": 0.5},
        **{"best_round": 7, "mean_last": 0.4, "accuracy": 0.123456, "adversarial": None, "autoattack": None},
        **{"asked": 30, "ok": 24, "participation": 0.8, "peak_over_budget": 0.98765, "bytes_down": 123456},
        **{"bytes_up": 1, "flops": 123456789.0, "seconds": 1.23456, "simulated": {"sd": 12.3456}, "models": None},
        **{"curve": [[1, 0.012345, 1.0, 1.0, 1.0, 0.1]]},
    )  # type: ignore[arg-type]
    return replace(record, **changes)  # type: ignore[arg-type]


def test_records_are_lines_in_the_definitions_order(make: Make, tmp_path: Path) -> None:
    claim, search = make(TWO_CASES), SearchRecord("weak", "FeDepth", "h", "c", "m", 3, {"0.123456": 0.5}, 0.123456, 9.0)
    runs = [a_record(case="skew"), a_record(), a_record(seed=1), a_record(row="bound"), a_record(row="ProFL")]
    path = Records("tiny", runs, [search]).write(claim, tmp_path / "docs")
    lines = path.read_text("utf-8").splitlines()
    assert len(lines) == 11
    found = Records.read("tiny", tmp_path / "docs")
    order = [(each.case, each.row, each.seed) for each in found.runs]
    profl, skew = ("weak", "ProFL", 2), ("skew", "FeDepth", 2)
    assert order == [("weak", "FeDepth", 1), ("weak", "FeDepth", 2), ("weak", "bound", 2), profl, skew]
    assert found.searches == [search]
    run = found.runs[1]
    assert (run.last, run.flops, run.bytes_down, run.seconds, run.simulated) == (
        0.1235,
        123500000,
        123456,
        1.235,
        {"sd": 12.35},
    )
    found.write(claim, tmp_path / "again")
    assert (tmp_path / "again" / "tiny.json").read_text("utf-8") == path.read_text("utf-8")


def test_damaged_records_are_named(tmp_path: Path) -> None:
    assert Records.read("tiny", tmp_path) == Records("tiny", [], [])
    (tmp_path / "tiny.json").write_text('{"claim": "tiny", "runs": [{"case": "weak"}], "searches": []}')
    with pytest.raises(
        ClaimError, match=r"tiny.json is damaged, or of another version: a record .* lacks \['accuracy', "
    ):
        Records.read("tiny", tmp_path)


def test_what_is_written_is_short() -> None:
    assert [rounded(value) for value in (0.98765, 123456.0, 7.0, 1e-7, 3, None, "a")] == [
        0.9877,
        123500,
        7.0,
        1e-7,
        3,
        None,
        "a",
    ]
    assert thinned([*range(20)]) == [*range(20)]
    assert thinned([*range(39)]) == [*range(0, 39, 2)]
    assert thinned([*range(7)], 3) == [0, 3, 6]
