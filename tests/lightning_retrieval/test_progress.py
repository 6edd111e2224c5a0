"""A log gets a line for each tenth of long work, a terminal gets a bar."""

import io

import pytest

from lightning_retrieval import progress
from lightning_retrieval.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """The time in seconds, as a list with one number, which a test sets."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def embed(clock, batches, *, seconds, **settings):
    with Progress("Embedding", units="images", **settings) as shown:
        for batch in batches:
            clock[0] += seconds
            shown.update(batch)


def test_a_log_gets_a_line_after_each_tenth_of_long_work(clock, capsys):
    embed(clock, [32] * 62 + [16], seconds=4.0, total=2_000)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Embedding: 416 of 2,000 images (20 %), 8 images/s, 0:03:18 left"  # the first tenth takes 28 s
    assert [line.split("(")[1].split(" %")[0] for line in lines] == [
        "20",
        "30",
        "40",
        "51",
        "60",
        "70",
        "80",
        "91",
        "100",
    ]
    assert lines[-1].endswith("(100 %), 7.94 images/s, 0:00:00 left")


@pytest.mark.parametrize(
    "settings",
    [{"total": 320, "seconds": 1.0}, {"total": None, "seconds": 9.0}, {"total": 320, "seconds": 9.0, "hidden": True}],
)
def test_short_work_work_of_unknown_length_and_other_processes_write_no_line(clock, capsys, settings):
    embed(clock, [32] * 10, **settings)
    assert capsys.readouterr().err == ""


def test_a_live_display_of_rich_gets_lines_and_no_bar(clock, monkeypatch):
    live = pytest.importorskip("rich.live")
    monkeypatch.setattr(progress, "SECONDS_BEFORE_BAR", 0)
    monkeypatch.setattr("sys.stderr", Terminal())
    console = live.Console(file=Terminal(), width=100, force_terminal=True)
    with live.Live("Epoch 1", console=console, auto_refresh=False):
        embed(clock, [32] * 10, seconds=9.0, total=320)
    shown = console.file.getvalue()
    assert "Embedding: 128 of 320 images (40 %)" in shown
    assert shown.count("Embedding:") == 7  # none in the first 30 seconds


def test_a_terminal_gets_a_bar(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BEFORE_BAR", 0)
    monkeypatch.setattr("sys.stderr", Terminal())
    with Progress("Embedding", total=64, units="images") as shown:
        shown.update(32)
        shown._bar.refresh()
        printed = progress.sys.stderr.getvalue()
    assert "Embedding:  50%" in printed
    assert " images/s" in printed
    assert "\n" not in printed
