"""The table of a fleet's devices."""

from pathlib import Path

from typer.testing import CliRunner

from piecework.cli import app

FLEET = """
name = "small"
assignment = "blocks"
[[device]]
name = "tiny"
memory-ratio = 0.004
flops = 1e9
disk-bandwidth = 1e7
disk-write-bandwidth = 1e6
[[device]]
name = "nearly"
memory-ratio = 0.9999
flops = 1e9
disk-bandwidth = 1e7
[[device]]
name = "half"
memory-ratio = 0.5
flops = 1e9
disk-bandwidth = 1e7
"""


def test_a_table_shows_what_two_decimals_and_the_speed_of_reading_would_hide(tmp_path: Path) -> None:
    """A ratio of 0.004 is not nothing, one of 0.9999 cannot hold a step, and a disk may write slowly."""
    file = tmp_path / "small.toml"
    file.write_text(FLEET)
    lines = CliRunner().invoke(app, ["devices", str(file)]).output.splitlines()
    tiny, nearly, half = (line for line in lines if "GFLOP" in line)
    assert "0.004 x step" in tiny
    assert "10 MB/s, writes 1 MB/s" in tiny
    assert "0.9999 x step" in nearly
    assert "0.50 x step" in half
    assert "writes" not in nearly + half
