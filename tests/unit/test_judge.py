"""`qkflow.judge`: tables in every form, pairing, looks, folders of runs, and error and power with known truth."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from qkflow import judge
from qkflow.errors import UsageError

BASE = {"0": 2.50, "1": 2.52, "2": 2.49, "3": 2.51}
ROWS = [
    *({"arm": "standard", "seed": seed, "loss": loss} for seed, loss in BASE.items()),
    *({"arm": "good", "seed": seed, "loss": loss - 0.09 + 0.002 * int(seed)} for seed, loss in BASE.items()),
    *({"arm": "same", "seed": seed, "loss": loss + 0.001 * (-1) ** int(seed)} for seed, loss in BASE.items()),
]


def write(path: Path, rows: list[dict[str, Any]] = ROWS, separator: str = ",", end: str = "\n") -> Path:
    lines = [separator.join(rows[0]), *(separator.join(str(value) for value in row.values()) for row in rows)]
    path.write_bytes(end.join([*lines, ""]).encode())
    return path


def kinds(table: Any, **options: Any) -> dict[str, str]:
    return {verdict.arm: verdict.kind for verdict in judge(table, **options).verdicts}


def test_arms_are_better_worse_or_equivalent(tmp_path: Path) -> None:
    assert kinds(ROWS) == {"good": "better", "same": "equivalent"}
    assert kinds(ROWS, higher_is_better=True) == {"good": "worse", "same": "equivalent"}
    assert kinds(ROWS, baseline="good") == {"standard": "worse", "same": "worse"}
    assert kinds(ROWS, margin_absolute=1e-4) == {"good": "better", "same": "undecided"}
    assert kinds(write(tmp_path / "runs.csv")) == kinds(str(tmp_path / "runs.csv")) == kinds(ROWS)


def test_the_p_value_of_a_single_arm_is_that_of_a_paired_t_test() -> None:
    rng = np.random.default_rng(0)
    base, arm = rng.normal(2, 0.1, (2, 6))
    rows = [("base", i, x) for i, x in enumerate(base)] + [("arm", i, x) for i, x in enumerate(arm)]
    (verdict,) = judge(rows).verdicts
    want = stats.ttest_rel(arm, base)
    assert verdict.p_adjusted == pytest.approx(want.pvalue)
    assert verdict.difference is not None
    assert (verdict.difference.low, verdict.difference.high) == pytest.approx(tuple(want.confidence_interval(0.95)))
    assert not verdict.difference.prior_used  # no prior for foreign losses


def test_the_plain_data_have_exactly_the_documented_keys() -> None:
    record = judge(ROWS).to_dict()
    assert list(record) == ["baseline", "error_rate", "verdicts"]
    assert (record["baseline"], record["error_rate"]) == ("standard", 0.05)
    for verdict in record["verdicts"]:
        assert list(verdict) == [
            "arm", "verdict", "difference", "low", "high", "p_adjusted", "paired", "seeds", "seeds_needed",
        ]  # fmt: skip
    good = record["verdicts"][0]
    assert (good["verdict"], good["paired"], good["seeds"], good["seeds_needed"]) == ("better", "paired", 4, None)
    assert good["difference"] == pytest.approx(-0.087)
    assert json.loads(json.dumps(record, allow_nan=False)) == record


class Frame:
    """What `judge` uses of a pandas data frame."""

    columns = ("arm", "seed", "loss")

    def to_dict(self, orient: str) -> list[dict[str, Any]]:
        assert orient == "records"
        return [{**row, "seed": np.int64(row["seed"]), "loss": np.float64(row["loss"])} for row in ROWS]


class PolarsFrame:
    def to_dicts(self) -> list[dict[str, Any]]:
        return ROWS


def test_rows_frames_and_columns_give_the_same_verdicts() -> None:
    want = judge(ROWS).to_dict()
    assert judge([tuple(row.values()) for row in ROWS]).to_dict() == want
    assert judge({name: [row[name] for row in ROWS] for name in ("seed", "loss", "arm")}).to_dict() == want
    assert judge(Frame()).to_dict() == want
    assert judge(PolarsFrame()).to_dict() == want
    assert judge(iter(ROWS)).to_dict() == want


def test_a_pandas_frame_is_read() -> None:
    pandas = pytest.importorskip("pandas")
    assert judge(pandas.DataFrame(ROWS)).to_dict() == judge(ROWS).to_dict()


@pytest.mark.parametrize(
    "text",
    [
        "\ufeffarm,seed,loss\r\na,x,1.0\r\na,y,1.1\r\nb,x,2.0\r\nb,y,2.2\r\n",
        ' Loss , note ,"Seed",ARM\n\n1.0,,x,a\n1.1,"a, b",y,a\n2.0,,x,b\n 2.2 ,,y, b \n\n',
        'arm,seed,loss\n"a","x",1.0\n"a","y",1.1\n"b","x",2.0\n"b","y",2.2',
    ],
)
def test_csv_files_of_many_programs_are_read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(text.encode())
    result = judge(path)
    assert {arm: dict(runs) for arm, runs in result.losses.items()} == {
        "a": {"x": 1.0, "y": 1.1},
        "b": {"x": 2.0, "y": 2.2},
    }


CSV_ERRORS = {
    "": "is empty",
    "\n\n": "is empty",
    "arm,seed,loss\n": "no rows",
    "arm,loss\na,1\n": "no column 'seed'",
    "a,0,1.0\na,1,2.0\n": "no column 'arm' or 'seed' or 'loss'",
    "arm;seed;loss\na;0;1\n": "separated by ';'",
    "arm\tseed\tloss\na\t0\t1\n": "expected commas",
    "arm,seed,loss\na,0,1\nb,0,2\n": "one seed",
    "arm,seed,loss\na,0,1\na,1,1\nb,0,2\n": "b has one seed",
    "arm,seed,loss\na,0,1\na,1,2\nb,0,nan\nb,1,2\n": "line 4: the loss is nan",
    "arm,seed,loss\na,0,1\na,1,inf\nb,0,1\nb,1,2\n": "line 3: the loss is inf",
    "arm,seed,loss\na,0,1\na,1,x\n": "line 3: the loss is 'x', expected a number",
    "arm,seed,loss\na,0,1\na,1,\n": "line 3: the loss is '', expected a number",
    "arm,seed,loss\na,0,1\n,1,2\n": "line 3: the arm is empty",
    "arm,seed,loss\na,0,1\na,0,2\nb,0,1\n": "line 3: arm a, seed 0 stands in .*line 2 already",
    "arm,seed,loss,block\na,0,1,x\na,0,2,x\n": "arm a, seed 0, block x stands in",
    "arm,seed,loss,block\na,0,1,x\na,0,2,y\na,1,1,x\n": "arm a, seed 1 has no block y: expected the same 2 blocks",
    "arm,seed,loss,block,weight\na,0,1,x,-1\n": "line 2: the weight -1 is negative",
    "arm,seed,loss,block,weight\na,0,1,x,1\na,1,1,x,2\n": "block x has the weight 2, and 1 before",
    "arm,seed,loss,block,weight\na,0,1,x,0\na,1,1,x,0\n": "all weights are 0",
    "arm,seed,loss,weight\na,0,1,1\n": "'weight' without a column 'block'",
    "arm,seed,loss,loss\na,0,1,1\n": "two columns are called 'loss'",
    "arm,seed,loss\na,0,1\na,1,2\n": "a single arm, 'a'",
    "arm,seed,loss\na,0\n": "got 2 fields, expected 3",
    "arm,seed,loss\na,0,0\na,1,0\nb,0,1\nb,1,2\n": "mean is 0",
    "arm,seed,loss\n\x00": "CSV|no rows|fields",
    "arm,seed,loss\na,0,1e200\na,1,1\nb,0,1\nb,1,2\n": "line 2: the loss is 1e.200: expected at most 1e.100",
    "arm,seed,loss\na,0,1e-200\na,1,2e-200\nb,0,1e-201\nb,1,2e-201\n": "all losses are below 1e-100",
    "arm,seed,loss\na,0,2_5\n": "the loss is '2_5', expected a number",
    "arm,seed,loss,block,weight\na,0,1,x,inf\n": "line 2: the weight is inf: expected a number",
}


@pytest.mark.parametrize("text", CSV_ERRORS)
def test_bad_tables_are_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(text.encode())
    with pytest.raises(UsageError, match=CSV_ERRORS[text]) as error:
        judge(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"baseline": "god"}, "unknown baseline 'god': did you mean 'good'"),
        ({"margin": 0.0}, "margin must be a number above 0"),
        ({"margin": math.nan}, "margin must be"),
        ({"margin_absolute": -1.0}, "margin-absolute must be"),
        ({"margin": 0.1, "margin_absolute": 0.1}, "both"),
        ({"look": 0}, "counted from 1"),
        ({"look": 1100}, "end at 30, got 1100"),
        ({"error_rate": 2.0}, "error_rate"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        judge(ROWS, **options)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], "no rows"),
        (3, "got a int"),
        ([("a", 0)], "expected a dictionary, or"),
        (["a,0,1"], "expected a dictionary, or"),
        ([{"arm": "a", "loss": 1}], "row 1: no column 'seed'"),
        ({"arm": ["a"], "seed": [0, 1], "loss": [1]}, "different lengths"),
        ("missing.csv", "does not exist"),
        ([("a", 0, True)], "row 1: the loss is True, expected a number"),
        ([("a", 0, 10**400)], "row 1: the loss is inf"),
    ],
)
def test_bad_rows_are_refused(table: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        judge(table)


def test_binary_files_and_folders_without_runs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00arm")
    with pytest.raises(UsageError, match="cannot be read as text"):
        judge(tmp_path / "binary.csv")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="has no runs"):
        judge(tmp_path / "folder")


def test_the_default_baseline_is_standard_or_the_first_arm_and_is_named() -> None:
    result = judge(ROWS)
    assert result.baseline == "standard"
    renamed = [{**row, "arm": row["arm"].replace("standard", "zero")} for row in ROWS]
    result = judge(renamed)
    assert result.baseline == "zero"
    assert "the first arm of the table" in result.notices[0]
    assert judge(renamed, baseline=" zero ").notices == ()


def test_each_arm_says_how_it_is_paired() -> None:
    rows = [("a", s, 1 + s / 100) for s in range(5)]
    rows += [("all", s, 1.1 + s / 100) for s in range(5)] + [("some", s, 1.2 + s / 90) for s in range(3, 8)]
    rows += [("none", f"x{s}", 1.3 + s / 100) for s in range(4)] + [("one", s, 1.4 + s / 100) for s in (4, 9, 10)]
    result = judge(rows)
    assert [verdict.paired for verdict in result.verdicts] == ["paired", "partly", "unpaired", "unpaired"]
    assert [record["seeds"] for record in result.to_dict()["verdicts"]] == [5, 2, 4, 3]
    notices = " ".join(result.notices)
    assert "some has 2 of its 5 seeds in common with a" in notices
    assert "none and a share fewer than 2 seeds: compared without pairs (Welch's test)" in notices
    welch = stats.ttest_ind([x for arm, _, x in rows if arm == "none"], [x for arm, _, x in rows if arm == "a"],
                            equal_var=False)  # fmt: skip
    assert result.verdicts[2].difference is not None
    assert result.verdicts[2].difference.p == pytest.approx(welch.pvalue)


def test_an_arm_with_one_seed_is_undecided_if_others_have_more() -> None:
    result = judge([*ROWS, {"arm": "late", "seed": "0", "loss": 2.4}])
    late = result.verdicts[-1]
    assert (late.kind, late.p_adjusted) == ("undecided", None)
    assert result.to_dict()["verdicts"][-1]["seeds"] == 1
    assert "late has fewer than 2 seeds: not compared" in result.notices
    result = judge([*ROWS, {"arm": "late", "seed": "9", "loss": 2.4}])
    assert "Welch" not in " ".join(result.notices)
    assert "late has fewer than 2 seeds: not compared" in result.notices


def test_undecided_arms_tell_how_many_seeds_would_decide() -> None:
    rng = np.random.default_rng(1)
    rows = [
        (arm, s, 2 + shift + 0.02 * rng.standard_normal()) for arm, shift in (("a", 0), ("b", 0.02)) for s in range(4)
    ]
    (verdict,) = judge(rows).verdicts
    assert verdict.kind == "undecided"
    assert verdict.seeds_needed is not None
    assert verdict.seeds_needed > 4


@pytest.mark.parametrize(("seeds", "kind"), [(2, "undecided"), (3, "undecided"), (5, "better")])
def test_rounded_losses_that_agree_by_chance_still_have_a_spread(seeds: int, kind: str) -> None:
    rows = [(arm, s, text) for arm, text in (("a", "0.91"), ("b", "0.92")) for s in range(seeds)]
    assert kinds(rows, higher_is_better=True, margin_absolute=1e-6) == {"b": kind}
    exact = [(arm, s, f"{text}00000") for arm, s, text in rows]
    assert kinds(exact, higher_is_better=True) == {"b": "better"}
    unpaired = [(arm, f"{arm}{s}", text) for arm, s, text in rows]
    (verdict,) = judge(unpaired, higher_is_better=True).verdicts
    assert verdict.difference is not None
    assert (verdict.difference.error or 0) > 0


def test_looks_share_the_error_rate() -> None:
    assert [judge(ROWS, look=look).error_rate for look in (1, 2, 3)] == pytest.approx([0.025, 0.0125, 0.00625])
    assert judge(ROWS).error_rate == 0.05
    assert judge(ROWS, look=1).verdicts[0].p_adjusted == judge(ROWS).verdicts[0].p_adjusted


def test_blocks_are_weighted_and_add_their_variance() -> None:
    blocks = {"x": 1.0, "y": 3.0}
    rows = [
        {"arm": arm, "seed": s, "block": block, "loss": 2 + shift[block] + 0.01 * s, "weight": weight}
        for arm, shift in (("a", {"x": 0, "y": 0}), ("b", {"x": 0.4, "y": -0.01}))
        for s in range(4)
        for block, weight in blocks.items()
    ]
    result = judge(rows)
    assert result.blocks == 2
    assert result.losses["b"]["0"] == pytest.approx(2 + (0.4 - 0.03) / 4)
    assert result.verdicts[0].kind == "undecided"  # two blocks that disagree
    flat = [
        (arm, s, loss + 0.001 * int(s) * (arm == "b"))
        for arm, by_seed in result.losses.items()
        for s, loss in by_seed.items()
    ]
    assert judge(flat).verdicts[0].kind == "worse"  # without blocks nothing disagrees
    assert judge(rows[::-1]).to_dict()["verdicts"][0]["arm"] == "a"


def run_folder(folder: Path, loss: float, *, step: int = 100, documents: np.ndarray | None = None) -> None:
    folder.mkdir(parents=True)
    records = [
        {"kind": "train", "step": 1, "loss": 9.0},
        {"kind": "eval", "step": step // 2, "loss": 8.0, "bits_per_byte": 8.5},
        {"kind": "eval", "step": step, "loss": 1.0, "bits_per_byte": loss},
        {"kind": "train", "step": step, "loss": 7.0},
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    if documents is not None:
        np.save(folder / "documents.npy", documents)


@pytest.mark.parametrize(
    "name", ["{arm}/seed-{seed}", "{arm}/{seed}", "{arm}-seed-{seed}", "{arm}_s{seed}", "{arm}-{seed}"]
)
def test_a_folder_of_runs_is_read(tmp_path: Path, name: str) -> None:
    for row in ROWS:
        run_folder(tmp_path / name.format(**row), row["loss"])
    result = judge(tmp_path)
    assert result.losses["good"] == {row["seed"]: row["loss"] for row in ROWS if row["arm"] == "good"}
    assert kinds(tmp_path) == kinds(ROWS)


def test_unfinished_runs_in_a_folder_are_left_out_with_a_notice(tmp_path: Path) -> None:
    for row in ROWS:
        run_folder(tmp_path / "runs" / row["arm"] / f"seed-{row['seed']}", row["loss"])
    run_folder(tmp_path / "runs" / "good" / "seed-4", 9.0, step=50)
    result = judge(tmp_path)
    assert "good seed 4" in " ".join(result.notices)
    assert kinds(tmp_path) == kinds(ROWS)


def test_document_losses_of_runs_are_blocks(tmp_path: Path) -> None:
    for row in ROWS:
        documents = np.zeros(3, dtype=[("nats", "f8"), ("bytes", "i8")])
        documents["bytes"] = [10, 20, 30]
        documents["nats"] = row["loss"] * math.log(2) * documents["bytes"]
        run_folder(tmp_path / row["arm"] / row["seed"], 5.0, documents=documents)
    result = judge(tmp_path)
    assert result.blocks == 3
    assert result.losses["good"]["0"] == pytest.approx(2.41)


def test_bad_run_folders_are_refused(tmp_path: Path) -> None:
    run_folder(tmp_path / "a" / "first", 1.0)
    with pytest.raises(UsageError, match="cannot tell the arm and the seed"):
        judge(tmp_path)
    (tmp_path / "b" / "x" / "0").mkdir(parents=True)
    (tmp_path / "b" / "x" / "0" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match="has no evaluation"):
        judge(tmp_path / "b")
    (tmp_path / "b" / "x" / "0" / "metrics.jsonl").write_text("[1\n")
    with pytest.raises(UsageError, match="cannot be read as JSON lines"):
        judge(tmp_path / "b")


def change_last(folder: Path, **values: Any) -> None:
    """Change the last evaluation of a run."""
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[2].update(values)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


@pytest.mark.parametrize("step", ["abc", [1], None, math.nan, math.inf, 10**400])
def test_a_step_that_is_no_number_is_refused(tmp_path: Path, step: Any) -> None:
    for row in ROWS:
        run_folder(tmp_path / row["arm"] / row["seed"], row["loss"])
    change_last(tmp_path / "good" / "1", step=step)
    with pytest.raises(UsageError, match=r"good/1/metrics\.jsonl: the step is .*expected a number") as error:
        judge(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("loss", [math.nan, math.inf, 1e200, 10**400, True, "x", [1]])
def test_a_loss_that_is_no_number_is_refused(tmp_path: Path, loss: Any) -> None:
    for row in ROWS:
        run_folder(tmp_path / row["arm"] / row["seed"], row["loss"])
    change_last(tmp_path / "good" / "1", bits_per_byte=loss)
    with pytest.raises(UsageError, match=r"good/1/metrics\.jsonl: the loss is"):
        judge(tmp_path)


def test_deeply_nested_metrics_are_refused(tmp_path: Path) -> None:
    run_folder(tmp_path / "a" / "0", 1.0)
    (tmp_path / "a" / "0" / "metrics.jsonl").write_text("[" * 10**5)
    with pytest.raises(UsageError, match="cannot be read as JSON lines"):
        judge(tmp_path)


def documents_of(loss: float) -> np.ndarray:
    documents = np.zeros(3, dtype=[("nats", "f8"), ("bytes", "i8")])
    documents["bytes"] = [10, 20, 30]
    documents["nats"] = loss * math.log(2) * documents["bytes"]
    return documents


@pytest.mark.parametrize(
    "change",
    [
        lambda documents: documents[None],
        lambda documents: documents[0],
        lambda documents: documents.astype([("nats", "U9"), ("bytes", "U9")]),
        lambda documents: np.zeros(3, [("nats", "f8", (2,)), ("bytes", "i8", (2,))]),
    ],
    ids=["two dimensions", "no dimension", "text", "several numbers"],
)
def test_document_losses_of_another_shape_are_refused(tmp_path: Path, change: Any) -> None:
    for row in ROWS:
        run_folder(tmp_path / row["arm"] / row["seed"], 5.0, documents=change(documents_of(row["loss"])))
    with pytest.raises(UsageError, match=r"documents\.npy has shape .*expected one number"):
        judge(tmp_path)


def test_a_damaged_documents_file_is_refused(tmp_path: Path) -> None:
    run_folder(tmp_path / "a" / "0", 1.0, documents=documents_of(1.0))
    path = tmp_path / "a" / "0" / "documents.npy"
    content = path.read_bytes()
    too_long = content.replace(b"(3,), }           ", b"(300000000000,), }")
    assert len(too_long) == len(content)
    for damaged in (too_long, content[:-1], content.replace(b"}", b" "), b""):
        path.write_bytes(damaged)
        with pytest.raises(UsageError, match=r"documents\.npy cannot be read .*truncated"):
            judge(tmp_path)


def test_document_losses_that_cannot_be_used_are_a_notice(tmp_path: Path) -> None:
    for row in ROWS:
        run_folder(tmp_path / row["arm"] / row["seed"], row["loss"], documents=documents_of(row["loss"]))
    path = tmp_path / "good" / "1" / "documents.npy"
    np.save(path, documents_of(1.0)[:2])
    assert "documents.npy hold different documents" in " ".join(judge(tmp_path).notices)
    path.unlink()
    result = judge(tmp_path)
    assert result.blocks == 1
    assert "documents.npy are missing in some runs" in " ".join(result.notices)
    assert kinds(tmp_path) == kinds(ROWS)


def simulated(rng: np.random.Generator, effects: tuple[float, ...], seeds: int) -> list[tuple[str, int, float]]:
    """Runs with known truth: a common effect of each seed, and noise of each run."""
    common = rng.normal(0, 0.05, seeds)
    return [
        (f"arm{a}", s, 2 + effect + common[s] + 0.01 * rng.standard_normal())
        for a, effect in enumerate((0.0, *effects))
        for s in range(seeds)
    ]


def test_false_verdicts_are_rare_and_true_effects_are_found() -> None:
    rng, studies = np.random.default_rng(0), 300
    false = equivalent = found = 0
    for _ in range(studies):
        said = kinds(simulated(rng, (0.0, 0.0, 0.0), 5), margin_absolute=1e-9)
        false += any(kind in ("better", "worse") for kind in said.values())
        said = kinds(simulated(rng, (0.02, 0.02, 0.02), 5), margin_absolute=0.02)
        equivalent += any(kind == "equivalent" for kind in said.values())
        found += kinds(simulated(rng, (0.05, 0.0, -0.05), 5))["arm1"] == "worse"
    assert false / studies < 0.08
    assert equivalent / studies < 0.08
    assert found / studies > 0.8
