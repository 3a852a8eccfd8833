"""`gate.toml`: exact decimals, the procedure's defaults, and every wrong key told."""

from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.core.errors import UsageError
from leadline.gate.config import BudgetTable, load_config
from leadline.gate.defaults import demo_config_path

MINIMAL = """
[workload]
kind = "dual-mind"
[data]
text = "stdlib"
[budget]
window_hours = 8
[disposition]
next = "continue"
"""


def load(tmp_path: Path, text: str) -> object:
    path = tmp_path / "gate.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path)[0]


def refused(tmp_path: Path, text: str) -> str:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text)
    return str(caught.value)


def test_defaults_are_the_procedures(tmp_path: Path) -> None:
    path = tmp_path / "gate.toml"
    path.write_text(MINIMAL, encoding="utf-8")
    config, content = load_config(path)
    shapes = [(point.name, point.micro_batch, point.seq_len) for point in config.sweep.points]
    assert shapes == [("P1", 16, 512), ("P2", 64, 512), ("P3", 32, 1024)]
    assert (config.sweep.window_seconds, config.sweep.steps) == (60.0, None)
    assert (config.sweep.warmup_steps, config.sweep.memory_limit_percent) == (10, 80)
    assert (config.twin.steps, config.twin.seq_len) == (200, 512)
    assert (config.twin.tolerance, config.twin.settle_steps) == (Decimal("0.05"), 20)
    assert content == MINIMAL.encode()


def test_budget_and_checkpoint_defaults_are_the_procedures(tmp_path: Path) -> None:
    path = tmp_path / "gate.toml"
    path.write_text(MINIMAL, encoding="utf-8")
    config, _ = load_config(path)
    budget = config.budget
    assert (budget.window_hours, budget.reserve_hours) == (Decimal(8), Decimal("0.75"))
    assert budget.utilisation == Decimal("0.85")
    assert (config.checkpoint.every_steps, config.checkpoint.every_seconds) == (500, 600)
    assert config.data.epochs == 1


@pytest.mark.parametrize("written", ["7.3", '"7.3"', "7.30"])
def test_decimals_are_read_exactly(tmp_path: Path, written: str) -> None:
    path = tmp_path / "gate.toml"
    path.write_text(MINIMAL.replace("= 8", f"= {written}"), encoding="utf-8")
    assert load_config(path)[0].budget.window_hours == Decimal("7.3")


@given(st.decimals(min_value="0.76", max_value="1000", places=6))
@settings(max_examples=50, deadline=None)
def test_any_decimal_survives_the_file_to_the_last_digit(
    tmp_path_factory: pytest.TempPathFactory, hours: Decimal
) -> None:
    path = tmp_path_factory.mktemp("c") / "gate.toml"
    path.write_text(MINIMAL.replace("= 8", f"= {hours}"), encoding="utf-8")
    assert load_config(path)[0].budget.window_hours == hours


def test_steps_take_the_place_of_seconds(tmp_path: Path) -> None:
    path = tmp_path / "gate.toml"
    path.write_text(MINIMAL + "[sweep]\nsteps = 60\n", encoding="utf-8")
    sweep = load_config(path)[0].sweep
    assert (sweep.steps, sweep.window_seconds) == (60, None)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (MINIMAL.replace("window_hours", "window_hour"), "did you mean window_hours?"),
        (MINIMAL + "[sweep]\nsecond = 3\n", "unknown key sweep.second (did you mean seconds?)"),
        (MINIMAL + "[twins]\nsteps = 3\n", "unknown key twins (did you mean twin?)"),
        (MINIMAL + "[sweep]\nsteps = 1\n", "key sweep.steps is 1"),
        (MINIMAL + "[sweep]\nsteps = true\n", "key sweep.steps is True"),
        (MINIMAL + "[sweep]\nsteps = 9.5\n", "key sweep.steps is"),
        (MINIMAL + "[sweep]\nmemory_limit_percent = 101\n", "memory_limit_percent is 101"),
        (MINIMAL + "[sweep]\neval_batches = 2\n", "eval_batches is 2"),
        (MINIMAL + "[environment]\ndevice = 'tpu'\n", "key environment.device is 'tpu'"),
        (MINIMAL + "[twin]\nsteps = 20\n", "nothing is left to judge"),
        (MINIMAL.replace("= 8", "= nan"), "window_hours"),
        (MINIMAL.replace("= 8", "= inf"), "window_hours"),
        (MINIMAL.replace("= 8", "= '8 h'"), "window_hours"),
        (MINIMAL.replace("= 8", "= true"), "window_hours"),
        (MINIMAL.replace("= 8", "= 0.75"), "nothing is left to train in"),
        (MINIMAL.replace("= 8", "= 0.5"), "nothing is left to train in"),
        (MINIMAL.replace("= 8", "= 8\nreserve_hours = -1"), "reserve_hours is -1"),
        (MINIMAL.replace("= 8", "= 8\nutilisation = 1.01"), "utilisation is 1.01"),
        (MINIMAL.replace("= 8", "= 8\nutilisation = 0"), "utilisation is 0"),
        (MINIMAL.replace('"continue"', '"pause"'), "pause_minutes"),
        (MINIMAL.replace('"continue"', '"continue"\npause_minutes = 3'), "pause_minutes"),
        (MINIMAL.replace('"continue"', '"sleep"'), "key disposition.next is 'sleep'"),
        (MINIMAL.replace('text = "stdlib"', ""), "exactly one of text, shards and pack"),
        (MINIMAL.replace('"stdlib"', '"stdlib"\npack = "x.tar"'), "['text', 'pack']"),
        (MINIMAL.replace('"stdlib"', '"stdlib"\nepochs = 0'), "data.epochs is 0"),
        ("seed = -1\n" + MINIMAL, "seed is -1"),
        (MINIMAL.partition("[data]")[0], "key data is missing; key budget is missing"),
    ],
)
def test_wrong_key_is_named_in_one_sentence(tmp_path: Path, text: str, told: str) -> None:
    message = refused(tmp_path, text)
    assert told in message
    assert "\n" not in message


POINT = '[[sweep.points]]\nname = "{}"\nmicro_batch = 4\nseq_len = 8\n'


@pytest.mark.parametrize(
    ("names", "more", "told"),
    [
        ("AB", "", "2 points; at least 3"),
        ("ABA", "", "two points of one name: ['A', 'B', 'A']"),
        ("ABC", "eval_batch = 3\n", "eval_batch 3 below micro_batch 4"),
        (["A", "B", "../C"], "", "name"),
        (["A", "B", "C d"], "", "name"),
    ],
)
def test_wrong_points_are_refused(
    tmp_path: Path, names: str | list[str], more: str, told: str
) -> None:
    points = "".join(POINT.format(name) for name in names)
    assert told in refused(tmp_path, MINIMAL + points + more)


def test_seconds_and_steps_together_are_refused(tmp_path: Path) -> None:
    both = MINIMAL + "[sweep]\nsteps = 60\nseconds = 60\n"
    assert "seconds or steps, not both" in refused(tmp_path, both)


@pytest.mark.parametrize("seconds", ["0", "-5"])
def test_sweep_of_no_time_is_refused(tmp_path: Path, seconds: str) -> None:
    assert "seconds" in refused(tmp_path, MINIMAL + f"[sweep]\nseconds = {seconds}\n")


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        ("twin", "tolerance", "-0.05"),
        ("sweep", "steady_percent", "-1"),
    ],
)
def test_negative_limit_is_refused(tmp_path: Path, table: str, key: str, value: str) -> None:
    assert key in refused(tmp_path, MINIMAL + f"[{table}]\n{key} = {value}\n")


@pytest.mark.parametrize("content", [b"[[[", b"\xff\xfe", b"a = 1\na = 2\n"])
def test_file_that_is_not_toml_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "gate.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="is not TOML"):
        load_config(path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        load_config(tmp_path / "none.toml")


def test_embedded_demo_configuration_loads() -> None:
    config, _ = load_config(demo_config_path())
    assert len(config.sweep.points) == 3
    assert config.disposition is not None


def test_every_example_configuration_loads() -> None:
    examples = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))
    assert examples != []
    for path in examples:
        assert load_config(path)[0].disposition is not None, path


def test_table_of_the_budget_is_frozen() -> None:
    table = BudgetTable(window_hours=Decimal(8))
    with pytest.raises(ValueError, match="frozen"):
        table.window_hours = Decimal(9)  # type: ignore[misc]


@pytest.mark.parametrize(("written", "kept"), [("1e1", "10"), ("2E-1", "0.2"), ("'1E+1'", "10")])
def test_decimal_with_an_exponent_is_kept_as_every_reader_writes_it(
    tmp_path: Path, written: str, kept: str
) -> None:
    path = tmp_path / "gate.toml"
    text = MINIMAL.replace("window_hours = 8", f"window_hours = {written}\nreserve_hours = 0.1")
    path.write_text(text, encoding="utf-8")
    assert str(load_config(path)[0].budget.window_hours) == kept


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("window_hours = 8", "window_hours = 1e400", "window_hours"),
        ("window_hours = 8", "window_hours = 8\nutilisation = 1e-30", "utilisation"),
        ('text = "stdlib"', 'text = "stdlib"\nepochs = 1000000000000000', "epochs"),
        ("[workload]", "seed = 9007199254740993\n[workload]", "seed"),
        ('kind = "dual-mind"', 'kind = "dual-mind"\nwidth = nan', "width is NaN"),
        ("[disposition]", "[optimizer]\nlearning_rate = nan\n[disposition]", "learning_rate"),
        ("[disposition]", "[twin]\ntolerance = 1e400\n[disposition]", "tolerance"),
    ],
)
def test_number_that_no_lock_or_model_can_hold_is_refused_by_name(
    tmp_path: Path, before: str, after: str, told: str
) -> None:
    assert told in refused(tmp_path, MINIMAL.replace(before, after))
