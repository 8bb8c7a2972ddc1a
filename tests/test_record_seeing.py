"""The script that makes the recordings, as a dry run: the same code, emulated, on a tiny model."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from cgkit.measuring import Crossover, LaunchOverhead, Timeline

SCRIPT = Path(__file__).parent.parent / "data" / "record_seeing.py"
MODES = ("eager", "compiled", "PIECEWISE", "FULL")


def script():
    spec = importlib.util.spec_from_file_location("record_seeing", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["record_seeing"] = module  # its dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_dry_run_records_every_part_and_says_what_it_is(tmp_path):
    command = "--device cpu --shapes tiny --batches 1 2 --context 16 --layers 1 --repeats 8"
    command += " --parts traces last launch crossover"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), *command.split()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    manifest = json.loads((tmp_path / "manifest-dry-run-seeing.json").read_text())
    assert (
        manifest["emulated"] is True and manifest["gpu"] == "" and str(tmp_path) not in json.dumps(manifest)
    )
    assert manifest["not_recorded"] == {"last tiny-llama": "needs a GPU: reduce-overhead records CUDA graphs"}
    files = manifest["files"]
    assert len(files) == 2 * len(MODES) + 2 and all((tmp_path / name).stat().st_size for name in files)
    for batch in (1, 2):
        for mode in MODES:
            name = f"dry-run-trace-tiny-llama-b{batch}-{mode}.json.gz"
            timeline = Timeline.from_trace(tmp_path / name)
            assert len(timeline.steps) == 3 and timeline.about["mode"] == mode
            assert timeline.about["emulated"] is files[name]["emulated"] is (mode in ("PIECEWISE", "FULL"))
            operators = timeline.events[timeline.events["kind"] == "op"]
            assert (operators["stage"] != "").all()
    overhead = LaunchOverhead.from_facts(json.loads((tmp_path / "dry-run-launch-overhead.json").read_text()))
    assert len(overhead.to_frame()) > 5 and "needs a GPU" in overhead.missing[0]
    curves = Crossover.from_facts(json.loads((tmp_path / "dry-run-crossover-tiny-llama.json").read_text()))
    assert curves.batches == [1, 2] and curves.about["emulated"] is True


def test_what_names_a_machine_is_refused():
    module = script()
    module.check_scrubbed(b'{"traceEvents":[]}')
    for leak in (b'{"host_name":"x"}', b'"/home/somebody/x.py"', str(module.ROOT).encode()):
        with pytest.raises(RuntimeError):
            module.check_scrubbed(leak)


def test_a_child_that_dies_is_told_apart_from_one_that_takes_long(tmp_path):
    module = script()
    for code, error in (
        ("import sys; sys.exit(3)", RuntimeError),
        ("import time; time.sleep(30)", TimeoutError),
    ):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        each = module.Child("traces", "tiny", process)
        module.threading.Thread(target=module._read, args=(each,), daemon=True).start()
        with pytest.raises(error):
            list(each.said(2.0 if error is TimeoutError else 20.0))
        process.kill()
        process.wait()
        process.stdout.close()
