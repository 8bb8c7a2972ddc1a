import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from cgkit import cli
from cgkit.config import CompilationConfig
from cgkit.errors import ConfigError


def cgkit(*arguments: str, **kwargs) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cgkit", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **kwargs)


def fake_tour(monkeypatch, run):
    monkeypatch.setitem(sys.modules, "cgkit.tour", SimpleNamespace(tour=run))


def result(equal=True):
    data = SimpleNamespace(tokens_equal=equal)
    return SimpleNamespace(data=data, text=lambda: "a table", facts=lambda: {"tokens_equal": equal})


def test_help_does_not_load_torch():
    code = "import sys; from cgkit.cli import build_parser; build_parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    help_text = cgkit("--help")
    assert help_text.returncode == 0
    assert "tour" in help_text.stdout and "bench" in help_text.stdout


@pytest.mark.parametrize(
    "arguments", [[], ["tour", "--tokens", "0"], ["tour", "--device", "tpu"], ["bench"], ["nope"]]
)
def test_wrong_usage_exits_with_2_and_says_what_is_wrong(arguments):
    done = cgkit(*arguments)
    assert done.returncode == 2
    assert "usage: cgkit" in done.stderr and done.stdout == ""


def test_an_error_of_ours_is_one_line_and_status_1(monkeypatch, capfd):
    def fail(*args, **kwargs):
        raise ConfigError("sizes=[0]:\n  the least that makes sense is 1")

    fake_tour(monkeypatch, fail)
    assert cli.main(["tour"]) == 1
    out, err = capfd.readouterr()
    assert (out, err) == ("", "cgkit: sizes=[0]: the least that makes sense is 1\n")
    assert cli.main(["tour", "--debug", "--json"]) == 1
    out, err = capfd.readouterr()
    assert out == "" and "Traceback" in err


def test_an_unknown_model_is_such_an_error():
    done = cgkit("tour", "--model", "no-such-model", "--json")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("cgkit: ") and done.stderr.count("\n") == 1
    assert "no-such-model" in done.stderr and "tiny-llama" in done.stderr


def test_an_error_that_is_not_ours_is_not_hidden(monkeypatch):
    def fail(*args, **kwargs):
        raise ZeroDivisionError

    fake_tour(monkeypatch, fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["tour"])


def test_json_is_alone_on_standard_output(monkeypatch, capfd):
    def noisy(*args, **kwargs):
        print("printed by a library")
        subprocess.run(["echo", "printed by a compiler"], check=True)
        return result()

    fake_tour(monkeypatch, noisy)
    assert cli.main(["tour", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == {"tokens_equal": True}
    for part in ("printed by a library", "printed by a compiler", "a table"):
        assert part in err
    print("standard output is back")
    assert capfd.readouterr().out == "standard output is back\n"


def test_without_json_the_table_is_on_standard_output(monkeypatch, capfd):
    fake_tour(monkeypatch, lambda *args, **kwargs: result())
    assert cli.main(["tour"]) == 0
    assert capfd.readouterr().out == "a table\n"


def test_tokens_that_differ_are_a_failure(monkeypatch, capfd):
    fake_tour(monkeypatch, lambda *args, **kwargs: result(equal=False))
    assert cli.main(["tour", "--json"]) == 1
    assert json.loads(capfd.readouterr().out) == {"tokens_equal": False}


def test_options_reach_the_tour(monkeypatch):
    seen = {}
    fake_tour(monkeypatch, lambda *args, **kwargs: seen.update(args=args, **kwargs) or result())
    cli.main(["tour", "--model", "tiny-llama", "--device", "cpu", "--tokens", "7", "--out", "x.html"])
    assert seen == {"args": ("tiny-llama",), "device": "cpu", "tokens": 7, "out": "x.html"}


def test_progress_is_a_line_a_stage_where_there_is_no_terminal(capfd):
    from cgkit import events

    with cli.progress_bars():
        events.emit(events.Progress("compiling", 1, 2, "submod_0"))
        events.emit(events.Progress("compiling", 2, 2, "submod_2"))
    events.emit(events.Progress("compiling", 2, 2, "nobody reads this"))
    assert capfd.readouterr() == ("", "  compiling: submod_2\n")


def test_a_benchmark_prints_its_table_or_its_rows(monkeypatch, capfd):
    import pandas as pd

    import cgkit.measuring

    seen = {}

    def run(layers, **options):
        seen.update(layers=layers, **options)
        return pd.DataFrame({"layers": layers, "compile_s": [1.0, 1.25]})

    bench = SimpleNamespace(run=run)
    monkeypatch.setitem(sys.modules, "cgkit.measuring.bench_dedup", bench)
    monkeypatch.setattr(cgkit.measuring, "bench_dedup", bench, raising=False)
    assert cli.main(["bench", "dedup", "--layers", "2", "8", "--compiler", "eager", "--json"]) == 0
    assert seen == {"layers": [2, 8], "compiler": "eager"}
    out, _ = capfd.readouterr()
    rows = [{"layers": 2, "compile_s": 1.0}, {"layers": 8, "compile_s": 1.25}]
    assert json.loads(out) == {"bench": "dedup", "rows": rows}
    assert cli.main(["bench", "dedup", "--layers", "2", "8"]) == 0
    assert capfd.readouterr().out.splitlines()[0].split() == ["layers", "compile", "(s)"]


def test_a_benchmark_is_asked_for_its_options_only_when_it_is_named(monkeypatch, capfd):
    import pandas as pd

    bench = SimpleNamespace(
        add_arguments=lambda parser: parser.add_argument("--steps", type=int, default=4),
        run=lambda args: {"steps": args.steps, "frame": pd.DataFrame({"n": [1]})},
    )
    monkeypatch.setitem(cli.BENCHES, "fake", ("nothing", lambda: bench))
    monkeypatch.setitem(cli.BENCHES, "other", ("nothing", lambda: 1 / 0))
    assert cli.main(["bench", "fake", "--steps", "8", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"bench": "fake", "steps": 8}
    with pytest.raises(ZeroDivisionError):
        cli.main(["bench", "other"])


def test_every_benchmark_writes_its_table_and_says_its_defaults(monkeypatch, capfd, tmp_path):
    import pandas as pd

    ran = []

    def add_arguments(parser):
        parser.add_argument("--steps", type=int, nargs="+", default=[4, 16], help="100 % of them")

    def run(args):
        ran.append(args)
        return {"frame": pd.DataFrame({"n": [1.5]})}

    bench = SimpleNamespace(add_arguments=add_arguments, run=run)
    monkeypatch.setitem(cli.BENCHES, "fake", ("nothing", lambda: bench))
    assert cli.main(["bench", "fake", "--csv", str(tmp_path / "new" / "t.csv")]) == 0
    assert (tmp_path / "new" / "t.csv").read_text() == "n\n1.5\n" and len(ran) == 1
    assert cli.main(["bench", "fake", "--csv", str(tmp_path)]) == 1 and len(ran) == 1  # said before the work
    assert "cannot be written" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["bench", "fake", "--help"])
    assert "100 % of them (default: 4 16)" in capfd.readouterr().out


def test_the_crossover_is_no_silent_quarter_of_an_hour_on_a_laptop(monkeypatch, capfd):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "crossover"]) == 1
    assert "--device cpu" in capfd.readouterr().err


def test_a_benchmark_draws_its_chart(monkeypatch, capfd, tmp_path):
    from tests.plotting import frames

    bench = SimpleNamespace(add_arguments=lambda parser: None, run=lambda args: {"frame": frames.dedup()})
    monkeypatch.setitem(cli.BENCHES, "dedup", ("nothing", lambda: bench))
    out = tmp_path / "new" / "chart.svg"
    assert cli.main(["bench", "dedup", "--out", str(out)]) == 0
    assert "20 times the layers" in out.read_text() and f"drawn: {out}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("bench", "option"), [("dedup", "--out"), ("headline", "--svg"), ("host", "--svg"), ("serve", "--chart")]
)
def test_a_picture_that_cannot_be_drawn_is_said_before_anything_is_measured(bench, option, capfd):
    with pytest.raises(SystemExit):
        cli.main(["bench", bench, option, "chart.gif"])
    assert "'chart.gif' does not end in .png, .svg or .pdf" in capfd.readouterr().err


@pytest.mark.parametrize("bench", ["adaptors", "custom-ops", "dedup", "passes", "startup", "static"])
def test_every_benchmark_of_the_compiler_has_a_chart(bench):
    from importlib import import_module

    from cgkit.measuring.bench_charts import CHARTS

    module, name = CHARTS[bench]
    assert callable(getattr(import_module(f"cgkit.plotting.{module}"), name)) and bench in cli.BENCHES


def test_the_cache_by_hand(cache_dir, tmp_path, capfd):
    from cgkit.compiling.cache import cache_key
    from cgkit.compiling.cache import folder as places

    def json_of(*arguments):
        assert cli.main(["cache", *arguments, "--json"]) == 0
        return json.loads(capfd.readouterr().out)

    keys = [cache_key(CompilationConfig(compiler=name), [], ()) for name in ("eager", "inductor")]
    for key in keys:
        places.make_private(places.rank_folder(key))
        places.write_key(places.rank_folder(key), key)
    listed = json_of("list")
    assert listed["folder"] == str(cache_dir) and {k["key"] for k in listed["keys"]} == {
        k.digest for k in keys
    }
    (difference,) = json_of("explain", keys[0].digest, keys[1].digest[:6])["differences"]
    assert (difference["factor"], difference["name"], difference["a"]) == ("config", "compiler", "eager")
    assert len(json_of("pack", str(tmp_path / "all.tgz"))["keys"]) == 2
    assert len(json_of("unpack", str(tmp_path / "all.tgz"))["keys"]) == 2
    assert cli.main(["cache", "unpack", str(tmp_path / "none.tgz")]) == 1
    assert "no packed compile cache" in capfd.readouterr().err
