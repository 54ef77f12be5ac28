"""The site: it is built without a warning, and a reader's words lead to the page that answers them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from document_helpers import ROOT, cards, pages

from benchmarks.docs import RECORDS, beside, commands_of, run_in, why_not
from benchmarks.docs import pages as written_by_hand
from benchmarks.site import write_pages
from piecework.training.methods import METHODS

PAGE = """
# A page

    piecework plan        # a comment
    piecework run \\
        --rounds 1
    accuracy 97 %

```python
piecework run --rounds 2
```

```
piecework devices
```
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx")
    folder = tmp_path_factory.mktemp("site")
    options = ["--fail-on-warning", "--keep-going", "--quiet", "--builder", "dirhtml", "-d", str(folder / "trees")]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, "docs", str(folder / "html")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "page"),
    [
        ("how to add a model", "tutorials/model"),
        ("what a budget of 60 MB does to ResNet-18", "howto/plan"),
        ("how FedProphet chooses epsilon", "systems/fedprophet"),
        ("how to resume", "howto/resume"),
        ("how to join a cluster", "howto/cluster"),
        ("which system to take for eight boards of 512 MB", "howto/plan"),
    ],
)
def test_a_readers_words_lead_to_a_page(asked: str, page: str, site: Path) -> None:
    """As the site's search does: pages that have each word, cut to its stem, as a term of their text or title or in one."""
    english = pytest.importorskip("sphinx.search.en").SearchEnglish({})
    text = (site / "searchindex.js").read_text("utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    words = [word for word in re.findall(r"\w+", asked.lower()) if word not in english.stopwords and not word.isdigit()]
    places = []
    for stem in map(english.stem, words):
        found = [at for kind in ("terms", "titleterms") for term, at in index[kind].items() if stem in term]
        places.append({at for each in found for at in (each if isinstance(each, list) else [each])})
    assert page in {index["docnames"][at] for at in set.intersection(*places)}, words


@pytest.mark.slow
def test_each_system_has_a_page_and_pages_are_written_once(site: Path, tmp_path: Path) -> None:
    found = {
        path.name: (path / "index.html").read_text("utf-8") for path in (site / "systems").iterdir() if path.is_dir()
    }
    assert found.keys() == {*METHODS}
    assert [name for name, text in found.items() if f"_images/{name}.svg" not in text] == []
    for _ in range(2):
        write_pages(tmp_path)
        times = [path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*.md"))]
        write_pages(tmp_path)
        assert [path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*.md"))] == times
    settings = (tmp_path / "reference" / "settings.md").read_text("utf-8")
    assert "| `training.lr` | `0.1`; " in settings
    assert "## `piecework resume" not in (commands := (tmp_path / "reference" / "commands.md").read_text("utf-8"))
    assert "| `--picture` | draw memory against budgets: .svg, .png or .pdf |" in commands


def test_the_commands_of_a_page() -> None:
    assert commands_of(PAGE) == ["piecework plan", "piecework run --rounds 1", "piecework devices"]


def test_what_comes_of_a_command(tmp_path: Path) -> None:
    program = "import sys, time; print('NAME'); time.sleep({}); sys.exit({})"
    done, failed, begun = (
        run_in(tmp_path, f'python -c "{program.format(*each)}"', 5) for each in ((0, 0), (0, 3), (60, 0))
    )
    assert (done["outcome"], failed["outcome"], begun["outcome"]) == ("done", "failed", "begun")
    assert (done["said"], failed["said"]) == ("", "demo\n")


def test_the_sentence_below_a_block() -> None:
    record = {"outcome": "done", "seconds": 97.4, "date": "2026-11-27", "commit": "abc"}
    records = {"piecework plan": record, "piecework devices": record | {"seconds": 2.0}}
    assert beside("piecework devices", records) == ""
    assert (
        beside("piecework plan   # as above\npiecework devices", records)
        == "Last run on 2026-11-27 at commit abc (97 s)."
    )
    begun = {"piecework plan": record | {"outcome": "begun"}}
    assert beside("piecework plan", begun) == "Last run on 2026-11-27 at commit abc (stopped before its end)."


def test_no_command_that_was_run_failed() -> None:
    records = json.loads(RECORDS.read_text("utf-8"))
    found = {each: page.name for page in pages() for each in commands_of(page.read_text("utf-8"))}
    assert len(found) > 100
    assert not [each for each, record in records.items() if record["outcome"] == "failed"]
    assert not [each for each in records if why_not(each)]


def test_each_command_was_run_or_has_a_reason_why_not() -> None:
    """Run new ones by `python -m benchmarks.docs run`."""
    records = json.loads(RECORDS.read_text("utf-8"))
    found = {each: page.name for page in written_by_hand() for each in commands_of(page.read_text("utf-8"))}
    assert {each: page for each, page in found.items() if each not in records and not why_not(each)} == {}


def test_links_outside_of_the_site_lead_to_files() -> None:
    """Those of README and its companions, and of the cards as they lie beside the code; the site's own are built strictly."""
    found = 0
    for page in [*ROOT.glob("*.md"), *cards()]:
        for target in re.findall(r"\]\(([^)\s#]+)", page.read_text("utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page}: {target}"
                found += 1
    assert found > 50
