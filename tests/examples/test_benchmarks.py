"""Each benchmark runs, prints its table and writes it as JSON. The numbers themselves are not tested."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.examples.scripts import imported

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OF_LINUX = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the /proc of Linux")
# test_a_benchmark_prints_and_writes_its_table runs all others.
OTHERS = {
    "break_statements",  # of the tests
    "compare_commits",  # below
    "ddp",  # below
    "elastic",  # below
    "glyphs",  # trains for minutes, and has no table
    "timing",  # what the benchmarks share
}
TABLES = sorted({path.stem for path in BENCHMARKS.glob("*.py")} - OTHERS)


@pytest.fixture
def results_of(tmp_path, run_python):
    """Run a benchmark with these options; returns its results, and what it prints."""

    def run(name, *options):
        file = tmp_path / "results.json"
        printed = run_python(
            BENCHMARKS / f"{name}.py", "--quick", *options, "--json", file, folder=tmp_path, timeout=600
        )
        written = json.loads(file.read_text())
        assert set(written["environment"]) == {"commit", "versions", "python", "device", "threads"}
        return written["results"], printed

    return run


@OF_LINUX
@pytest.mark.parametrize("name", TABLES)
def test_a_benchmark_prints_and_writes_its_table(name, results_of):
    if name == "stores":
        pytest.importorskip("pymilvus")
        pytest.importorskip("milvus_lite")
    results, printed = results_of(name)
    columns = {column for row in results for column in row}
    assert len(columns) >= 3
    published = BENCHMARKS / "results" / f"{name}.json"
    if published.exists():
        assert columns == {column for row in json.loads(published.read_text())["results"] for column in row}
    for column in columns:
        assert column in printed
        assert any(row.get(column) is not None for row in results)
    if "added MiB" in columns and name != "search":  # whose small index fits into what is free already
        assert max(row.get("added MiB") or 0 for row in results) > 0
    timings = [(column, value) for row in results for column, value in row.items() if isinstance(value, dict)]
    assert timings
    assert all(t["lowest"] <= t["median"] <= t["highest"] for _, t in timings)
    # A difference of two times may be below 0 on a machine that does other work.
    assert all(t["lowest"] > 0 for column, t in timings if column != "above the shortest")


def test_an_epoch_of_photographs_and_of_their_smaller_copies(results_of):
    results, printed = results_of("images", "--epoch")
    seconds = {row["what"]: row["seconds"] for row in results}
    assert seconds.keys() == {"epoch, photographs", "shrink", "epoch, their copies"}
    assert all(value > 0 for value in seconds.values())
    assert "photographs" in printed


@pytest.mark.parametrize(
    ("name", "flag", "ratio", "others", "rows"),
    [
        ("losses", "--products", "over its products", {"loss", "batch", "threads"}, {"SmoothAPLoss", "HAPLoss"}),
        pytest.param(
            *("losses", "--compile", "compiled over plain", {"loss", "batch"}, {"CalibrationLoss"}),
            marks=pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler of C++"),
        ),
        ("large_batch", "--kept", "over the prediction", {"chunks", "keep_graphs", "over keeping all"}, {1}),
    ],
)
def test_a_flag_compares_in_turns(name, flag, ratio, others, rows, results_of):
    results, _ = results_of(name, flag)
    assert all(set(row) == {*others, ratio, "lowest", "highest", "runs"} for row in results)
    assert all(0 < row["lowest"] <= row[ratio] <= row["highest"] for row in results)
    assert rows <= {row.get("loss", row.get("keep_graphs")) for row in results}


def test_the_share_of_counting_is_measured_for_each_number_of_processes(results_of):
    rows, _ = results_of("losses", "--processes")
    assert [row["processes"] for row in rows] == [1, 8, 64, 512]
    assert all(row["lowest"] <= row["share of counting"] <= row["highest"] for row in rows)


def test_losses_of_rounded_embeddings_are_compared_with_exact_ones(results_of):
    rows, _ = results_of("losses", "--rounding")
    smooth_ap = [row for row in rows if row["loss"] == "SmoothAPLoss"]
    assert [row["embeddings"] for row in smooth_ap] == ["one direction", "unrelated", "in classes"]
    for row in smooth_ap:  # bfloat16 has three bits less
        assert 0 < row["float16 gradient %"] < row["bfloat16 gradient %"] < 10
        assert row["float16 loss %"] < row["bfloat16 loss %"] < 1


def test_an_evaluation_with_a_large_class_is_compared_with_its_product(results_of):
    rows, _ = results_of("metrics", "--classes")
    assert [row["set"] for row in rows] == ["half in one class", *(f"classes of {size}" for size in (1, 25, 250, 500))]
    for row in rows:
        assert row["ratio"] == row["evaluation"]["median"] / row["product alone"]["median"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler of C++")
def test_a_compiled_network_is_compared_with_a_plain_one(results_of):
    ((row,), _) = results_of("loop", "--compile")
    published = json.loads((BENCHMARKS / "results" / "compiled.json").read_text())["results"]
    assert set(row) == set(published[0])
    assert row["compiled over plain"] == row["compiled step"]["median"] / row["plain step"]["median"]


@OF_LINUX
def test_an_index_on_disk_is_compared_with_faiss_alone(results_of):
    pytest.importorskip("milvus_lite")  # whose version is printed
    (one, two, alone), _ = results_of("search", "--disk")
    published = json.loads((BENCHMARKS / "results" / "disk.json").read_text())["results"]
    assert set(one) == set(two) == set(alone) == set(published[0])
    assert one["recall@10"] == two["recall@10"]
    assert one["recall@10"] == pytest.approx(alone["recall@10"], abs=0.1)
    assert all(row["adds in MiB"] > 0 < row["CPU time in s"] for row in (one, two, alone))
    assert one["over faiss alone"] == one["CPU time in s"] / alone["CPU time in s"]


@OF_LINUX
def test_an_evaluation_by_several_processes_has_the_same_map(results_of):
    results, _ = results_of("metrics", "--processes")
    assert [row["processes"] for row in results] == [1, 2] * 6
    columns = {"set", "images", "D", "queries", "processes", "time", "CPU time", "added MiB", "mAP"}
    assert all(set(row) == columns for row in results)
    for one, two in zip(results[::2], results[1::2]):
        assert one["set"] == two["set"]
        assert 0 < float(one["mAP"]) < 1
        assert one["mAP"] == two["mAP"]
    assert len({row["mAP"] for row in results}) >= 3  # of small classes, one large class, and expanded


def test_functions_are_timed_in_turn():
    with imported(BENCHMARKS, "timing") as script:
        timing = script
    now, called = [0.0], []

    def takes(name, seconds):
        called.append(name)
        now[0] += seconds * len(called)

    functions = {"a": lambda: takes("a", 1), "b": lambda: takes("b", 10)}
    turns = timing.timed_in_turn(functions, 2, "cpu", clock=lambda: now[0])
    assert called == ["a", "b"] * 3  # the first turn is not counted
    assert turns == [{"a": 3, "b": 40}, {"a": 5, "b": 60}]
    called.clear()
    found = timing.interleaved(functions, 3, "cpu", warm_up=0, clock=lambda: now[0])
    assert (found["b"].lowest, found["b"].median, found["b"].highest, found["b"].runs) == (20, 40, 60, 3)
    assert timing.range_of("ratio", [3.0, 1.0, 2.5]) == {"ratio": 2.5, "lowest": 1.0, "highest": 3.0}


def test_the_parts_of_a_step_are_timed_without_those_inside_them(monkeypatch):
    with imported(BENCHMARKS, "step") as script:
        step = script
    now = [0.0]
    monkeypatch.setattr(step.time, "perf_counter", lambda: now[0])
    clock = step.PartClock("cpu")

    def takes(seconds):
        now[0] += seconds

    def embed():
        takes(1)
        clock.timed("loss", loss)()
        takes(2)

    def loss():
        takes(10)
        clock.timed("communication", takes)(200)
        takes(20)

    for _ in range(2):
        clock.timed("reading", takes)(4000)
        takes(1000)
        clock.timed("embedding", embed)()
        clock.on_train_batch_end(None, None, None, None, 0)
    wanted = {"reading": 4000, "preparing": 0, "embedding": 3, "loss": 30, "communication": 200, "rest": 1000}
    assert clock.steps == [wanted, wanted]
    row = step.row_of("resnet50", 2, 16, clock.steps)
    assert row["loss %"] == 100 * 30 / 5233
    assert (row["step"].median, row["step"].runs) == (5233, 2)


def test_the_ddp_benchmark_counts_the_bytes_that_the_model_predicts(results_of):
    (one, two), printed = results_of("ddp")
    assert set(one) == {"processes", "batch", "dim", "step"}
    new = {"waiting %", "transfer %", "transfer", "predicted ms", "sent MB", "model MB", "bandwidth MB/s"}
    assert set(two) == set(one) | new
    assert all(column in printed for column in two)
    assert (one["processes"], two["processes"]) == (1, 2)
    # The model does not count the sizes of the shards, which parameters have a gradient, and the loss.
    assert two["model MB"] < two["sent MB"] < two["model MB"] + 0.0005
    assert 0 < two["waiting %"] + two["transfer %"] < 100


def test_the_ddp_benchmark_compares_weights(results_of):
    """The bounds of `docs/large-batches.md`: with rounded products, weights differ more."""
    results, _ = results_of("ddp", "--weights")
    ways = ("chunks of 32", "chunks of 5", "2 processes")
    precisions = ("float32", "bf16-mixed", "bf16-mixed, float32 output")
    assert [(row["precision"], row["weights"]) for row in results] == [(a, b) for a in precisions for b in ways]
    for row in results:
        assert 0 < row["norm"] < (0.02 if row["precision"] == "float32" else 0.3)
        assert 0 < row["largest"] < 0.0125  # AdamW changes a weight by about 0.001 in a step


@OF_LINUX
def test_a_run_on_two_nodes_goes_on_after_kills(results_of):
    """The benchmark itself compares weights and metrics with those of an undisturbed run."""
    rows, _ = results_of("elastic")
    assert [row["killed"] for row in rows] == ["workers", "first node, started again", "first node"]
    assert [row["same weights"] for row in rows[:2]] == [True, True]
    assert all(row["same metrics"] and row["largest difference"] < 1e-9 for row in rows)


def test_a_commit_is_compared_with_itself(tmp_path, run_python):
    if not (BENCHMARKS.parent / ".git").exists():
        pytest.skip("needs the history of the repository")
    file = tmp_path / "results.json"
    script = BENCHMARKS / "compare_commits.py"
    run_python(script, "HEAD", "loop", "--pairs", "2", "--quick", "--json", file, folder=tmp_path, timeout=600)
    rows = json.loads(file.read_text())["results"]
    assert {row["of"] for row in rows} >= {"plain step", "RetrievalModule's step", "CPU time"}
    assert all(0 < row["lowest"] <= row["now over before"] <= row["highest"] for row in rows)


def test_each_commit_runs_its_own_code(tmp_path):
    if not (BENCHMARKS.parent / ".git").exists():
        pytest.skip("needs the history of the repository")
    with imported(BENCHMARKS, "compare_commits") as compare_commits:
        compare_commits.check_out("HEAD", tmp_path / "before")
        package = tmp_path / "before" / "installed" / "lightning_retrieval"
        (package / "__init__.py").write_text("raise SystemExit(3)")
        with pytest.raises(subprocess.CalledProcessError, match="exit status 3"):
            compare_commits.run(tmp_path / "before", "loop", ["--quick"])
