"""The rules of the house: what no single part can be tested for."""

import ast
import contextlib
import io
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import cgkit
from cgkit import torch_hooks
from cgkit.cli import build_parser, main

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "cgkit").rglob("*.py"))
STAGES = ("tracing", "splitting", "compiling", "capturing", "serving")

HOOKS = ROOT / "cgkit" / "torch_hooks"


def run(*command: str) -> str:
    """Runs a tool of this environment in the repository; fails with what it printed."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tool(name: str) -> str:
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        pytest.skip(f"{name} is not installed here")
    return str(path)


def test_import_costs_little_more_than_torch():
    code = "import torch, time; t = time.perf_counter(); import cgkit; print(time.perf_counter() - t)"
    costs = [float(run(sys.executable, "-c", code)) for _ in range(3)]
    assert min(costs) <= 0.3


def test_a_configuration_costs_no_compiler_and_no_plot():
    code = (
        "import torch, sys; before = set(sys.modules); import cgkit; cgkit.CompilationConfig(); "
        "cgkit.compilation_counter; print(*(set(sys.modules) - before))"
    )
    loaded = run(sys.executable, "-c", code).split()
    heavy = {"matplotlib", "pandas", "transformers", "triton", "IPython"} & {m.split(".")[0] for m in loaded}
    assert heavy == set()


def test_arrows_between_the_folders_point_one_way():
    assert "0 broken" in run(tool("lint-imports"), "--no-cache")


@pytest.mark.parametrize("arguments", [("check",), ("format", "--check")], ids=" ".join)
def test_ruff(arguments):
    run(tool("ruff"), *arguments, "cgkit", "tests")


def private_torch_names(source: str) -> set[str]:
    """Every ``torch.…._x`` that code (not text) reaches for, up to and with its first private part."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if match := re.match(r"torch\.(?:[a-z]\w*\.)*_[a-z]\w*", name, re.I):
                found.add(match[0])
    return found


def test_the_search_for_private_names_finds_them():
    lines = [
        "from torch._inductor import config",
        "import torch",
        "torch.fx._lazy",
        "'torch._x'",
        "torch.fx.Node",
    ]
    source = "\n".join([*lines, "torch.ops.aten._to_copy"])
    assert private_torch_names(source) == {"torch._inductor", "torch.fx._lazy", "torch.ops.aten._to_copy"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_private_names_of_torch_stand_in_torch_hooks(path):
    if HOOKS in path.parents:
        return
    names = private_torch_names(path.read_text())
    # an operator's own name may begin with an underscore (aten._to_copy): that is no hook
    names = {name for name in names if not name.startswith("torch.ops.")}
    assert names == set()


@pytest.mark.parametrize(
    "name", [name for name in torch_hooks.__all__ if callable(getattr(torch_hooks, name))]
)
def test_every_hook_says_on_which_versions_it_was_run(name):
    hook = getattr(torch_hooks, name)
    if hook.__module__.startswith("torch.") or name in {"gone", "SideEffect"}:
        return  # torch's own class under a name of ours; no hook
    assert re.search(r"Run on (torch|Triton) \d\.\d+", hook.__doc__)


@pytest.mark.parametrize("name", cgkit.__all__)
def test_every_public_name_resolves_and_says_what_it_is(name):
    value = getattr(cgkit, name)
    assert (getattr(value, "__doc__", None) or "").strip()
    assert name in dir(cgkit)


def test_type_checkers_see_every_public_name():
    tree = ast.parse((ROOT / "cgkit" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.name for node in block.body for alias in node.names}
    assert seen == set(cgkit.__all__)


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_says_what_it_is_and_has_a_readme(stage):
    assert len(import_module(f"cgkit.{stage}").__doc__) > 30
    assert (ROOT / "cgkit" / stage / "README.md").stat().st_size > 300


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        cgkit.nothing  # noqa: B018


def test_commands_of_the_readme_exist():
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    blocks = re.findall(r"```console\n(.*?)```", readme, re.S)
    inline = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", readme, flags=re.S))
    code = "\n".join(blocks + inline)
    used = set(re.findall(r"\bmake (?:[A-Z]+=\S+ )*([a-z][a-z-]*)", code))
    assert {"tour", "test", "lab"} <= used <= targets
    for command in set(re.findall(r"\bcgkit ([a-z]+)", code)):
        with pytest.raises(SystemExit) as ended, contextlib.redirect_stdout(io.StringIO()):
            main([command, "--help"])
        assert ended.value.code == 0, command


PAGES = ("README.md", "data/README.md", "docs/zh/quickstart.md", "notebooks/README.md")


@pytest.mark.parametrize("page", PAGES)
def test_the_options_of_the_pages_commands_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```console\n(.*?)```", text, re.S)
    commands = [line for block in blocks for line in block.splitlines()]
    commands += re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    for command in (command for command in commands if command.startswith("cgkit ")):
        build_parser().parse_args(shlex.split(command, comments=True)[1:])


def check_own_model(names):
    assert [len(answer.token_ids) for answer in names["tokens"]] == [8, 8]
    assert names["mine_captured"].num_graphs == 4 * 2
    plain = names["MyModel"](compilation_config=cgkit.CompilationConfig(level=0))
    plain.load_state_dict(names["mine"].state_dict())
    for size in (1, 6, 8, 11):
        rows = torch.randn(size, 16, generator=torch.Generator().manual_seed(size))
        torch.testing.assert_close(names["mine"](rows), plain(rows))


def test_the_code_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it writes a file
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) == 5
    names: dict[str, object] = {}
    for number, code in enumerate(blocks):  # each goes on where the one before it ended
        path = tmp_path / f"block_{number}.py"  # Dynamo does not look into code without a file
        path.write_text(code)
        exec(compile(code, path, "exec"), names)
    check_own_model(names)
    assert names["timeline"].bill().wall_us > 0
    assert (tmp_path / "for-perfetto.json.gz").stat().st_size > 0
    assert len(names["split"].pieces) == 9
    assert names["captured"].num_graphs == 5 * 4
    assert len(names["answer"][0].token_ids) == 8


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / "README.md").read_text())
    assert links and [link for link in links if not (ROOT / link).exists()] == []


def test_ci_runs_the_tests_and_stops_at_the_first_failure():
    script = (ROOT / ".ci" / "run").read_text()
    assert "set -euo pipefail" in script and "make test\n" in script
