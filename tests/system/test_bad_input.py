"""What an operator or an author may get wrong: refused before anything is started, in words that say what to do."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import structlog
from system_processes import SCRIPTED, machine
from typer.testing import CliRunner

from coordinator.cli.main import app
from scenarios.library import library
from tinker.models import DEMO

HEAD = "from scenarios import Scores, Table, scenario\n"
ONE = '''
@scenario("ann", version=1)
async def {name}(table: Table) -> Scores:
    """One says something."""
    await table["ann"].act("Say it:", str)
    return {{"ann": 1.0}}
'''


def refused(*arguments: str) -> str:
    """What is said on stderr when these arguments are refused. Nothing may have been started."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2, (result.output, result.exception)
    assert psutil.Process().children() == []
    assert "Traceback" not in result.stderr
    return result.stderr


def run_refused(*arguments: str) -> str:
    said = refused("run", *arguments)
    assert said.startswith("opentinker: ")
    assert not Path("runs").exists()
    return said


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    structlog.reset_defaults()  # a command that was run in here has set up logging to a stderr that is closed by now


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["gues"], ["no scenario 'gues'", "did you mean 'guess'?", "dilemma, guess", "path/to/file.py"]),
        (["nothing.py"], ["no scenario file", "nothing.py"]),
        (["guess", "--set", "agents.hintr.learning.lr=1"], ["agents.hintr: no seat has this name", "hinter, guesser"]),
        (["guess", "--set", "agents.a.seats=['hinter', 'x']"], ["agents.a.seats: unknown seat 'x'"]),
        (["guess", "--set", f"agents.{'a' * 61}.seats=['hinter']"], ["expected at most 60 letters, digits, '_' or '-'"]),
        (["guess", "--set", "agents.hinter.seats=['guesser']"], ["seat 'hinter' is played by nobody"]),
        (["guess", "--set", "agents.a.seats=['hinter']", "--set", "agents.b.seats=['hinter']"], ["'hinter' is played by two"]),
        (["guess", "--set", "roundz=3"], ["roundz: unknown key (got 3)"]),
        (["guess", "--set", "rounds"], ["--set 'rounds' is no assignment", "key=value"]),
        (["guess", "--set", "learning.algorithm=sarsa"], ["no algorithm 'sarsa'", "grpo, reinforce"]),
        (["guess", "--set", "learning.loss=mse"], ["no loss 'mse'", "cross_entropy, importance_sampling, ppo"]),
        (["guess", "--set", "learning.targets=['qproj']"], ["learning.targets: demo has no layer qproj", "q_proj"]),
        (["guess", "--set", "learning.targets=[]"], ["learning.targets: an adapter needs at least one layer"]),
        (["guess", "--set", "params.secret=3"], ["no parameter 'secret'", "secret_max, tries"]),
        (["guess", "--set", "params.secret_max=many"], ["parameter 'secret_max' is 'many'; allowed is int"]),
        (["guess", "--set", "update_order=[['hinter'], ['x']]"], ["update_order: unknown agent 'x'", "hinter, guesser"]),
        (["guess", "--set", "update_order=[['hinter', 'hinter']]"], ["update_order: 'hinter' is named 2 times"]),
        (["guess", "--engine", "vllm"], ["engine: Input should be 'torch' or 'scripted' (got 'vllm')"]),
        (["guess", "--seed", "-1"], ["seed: Input should be greater than or equal to 0 (got -1)"]),
        (["guess", "--config", "none.toml"], ["cannot read the configuration none.toml: No such file or directory"]),
        (["guess", "--model", "/none/at/all"], ["there is no directory /none/at/all", "`demo`"]),
        (["guess", "--model", "nobody/nothing"], ["'nobody/nothing' is no directory here", "local model directory"]),
        (["guess", "--coordinator", "nonsense"], ["'nonsense' is no address", "tcp://127.0.0.1:7654"]),
        (["guess", "--coordinator", "tcp://127.0.0.1"], ["'tcp://127.0.0.1' is no address"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_what_to_do(
    arguments: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = run_refused(*arguments)
    for each in expected:
        assert each in said


def test_all_problems_are_told_in_one_go() -> None:
    """Case M4."""
    said = run_refused(
        "guess", "--model", "/none/at/all", "--rounds", "0", "--set", "learning.lr=-1", "--set", "roundz=3",
        "--set", "agents.hinter.learning.lr=0", "--set", "agents.hinter.learning.rang=2", "--set", "learning.rank=0",
    )  # fmt: skip
    assert said.splitlines() == [
        "opentinker: the configuration is wrong:",
        "  rounds: Input should be greater than or equal to 1 (got 0)",
        "  learning.lr: Input should be greater than 0 (got -1)",
        "  learning.rank: Input should be greater than or equal to 1 (got 0)",
        "  agents.hinter.learning.lr: Input should be greater than 0 (got 0)",
        "  agents.hinter.learning.rang: unknown key (got 2)",
        "  roundz: unknown key (got 3)",
        "model: there is no directory /none/at/all; give a model directory, a hub name, `demo` or `smollm2`",
    ]
    said = run_refused(
        "guess", "--model", "/none/at/all", "--set", "learning.loss=mse", "--set", "agents.x.learning.algorithm=a",
        "--set", "params.y=1", "--set", "update_order=[['z']]",
    )  # fmt: skip
    for each in (
        "agents.x: no seat",
        "no parameter 'y'",
        "unknown agent 'z'",
        "no algorithm 'a'",
        "no loss 'mse'",
        "/none",
    ):
        assert each in said


def test_options_that_do_not_exist_are_refused() -> None:
    assert "No such option: --round" in refused("run", "guess", "--round", "3")
    assert "No such command 'rum'" in refused("rum")
    assert "Invalid value for '--rounds'" in refused("run", "guess", "--rounds", "x")


@pytest.mark.parametrize(("text", "expected"), [("rounds = \n", "is no TOML"), (b"\xff", "is no TOML")])
def test_a_file_that_is_no_toml_is_refused(elsewhere: Path, text: str | bytes, expected: str) -> None:
    (elsewhere / "run.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert f"run.toml {expected}" in run_refused("guess", "--config", "run.toml")


def without(name: str) -> Callable[[Path], None]:
    return lambda model: (model / name).unlink()


def smaller(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 10}))


def torn(model: Path) -> None:
    (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:100])


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (without("tokenizer.json"), "tokenizer.json"),
        (without("config.json"), "has no config.json; give the directory that save_pretrained"),
        (without("chat_template.jinja"), "chat template"),
        (smaller, "has a vocab_size of 10; remove the added tokens, or resize"),
        (torn, "model.safetensors cannot be read"),
    ],
)
@pytest.mark.parametrize("command", [("run", "guess", "--model"), ("taskserver", *SCRIPTED, "--model")])
def test_a_model_that_cannot_be_used_is_refused(
    elsewhere: Path, command: tuple[str, ...], damage: Callable[[Path], None], expected: str
) -> None:
    if damage is torn and command[0] == "taskserver":
        pytest.skip("the scripted engine reads no weights")
    model = Path(shutil.copytree(DEMO, elsewhere / "model"))
    damage(model)
    said = refused(*command, str(model))
    assert said.startswith("opentinker: model ")
    assert expected in said


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("import no_such_module_at_all\n", "", ["could not be imported: ModuleNotFoundError", "no_such_module_at_all"]),
        ("def broken(:\n", "", ["could not be imported: SyntaxError"]),
        ("raise SystemExit(0)\n", "", ["could not be imported: SystemExit"]),
        ("x = 1\n", "", ["must hold one scenario", "it has: none"]),
        (HEAD + ONE.format(name="a") + ONE.format(name="b"), "", ["must hold one scenario", "it has: a, b"]),
        (HEAD + ONE.format(name="alpha"), ":alpah", ["has no scenario 'alpah'", "did you mean 'alpha'?"]),
        (HEAD + ONE.format(name="a").replace("async ", "").replace("await ", ""), "", ["is not an `async def`"]),
    ],
)
def test_a_scenario_file_that_cannot_be_used_is_refused(
    elsewhere: Path, text: str, name: str, expected: list[str]
) -> None:
    (elsewhere / "mine.py").write_text(text)
    said = run_refused(f"mine.py{name}")
    for each in expected:
        assert each in said


def test_a_directory_that_holds_a_run_or_cannot_be_one_is_refused(elsewhere: Path) -> None:
    (elsewhere / "old").mkdir()
    (elsewhere / "old" / "metrics.jsonl").touch()
    assert "old already holds a run" in run_refused("guess", "--out", "old")
    (elsewhere / "file").touch()
    for out in ("file", "file/run"):
        assert "a file stands where a directory is needed" in run_refused("guess", "--out", out)


@pytest.mark.parametrize("name", sorted(library()))
def test_what_check_prints_is_a_configuration(elsewhere: Path, name: str) -> None:
    extra = ("--set", "params={}", "--set", "learning.lr=1e-05", "--set", "update_order=in_turn", "--seed", "5")
    printed = CliRunner().invoke(app, ["run", name, "--check", *extra])
    assert printed.exit_code == 0, printed.output
    assert tomllib.loads(printed.stdout)["learning"]["lr"] == 1e-05
    (elsewhere / "run.toml").write_text(printed.stdout)
    again = CliRunner().invoke(app, ["run", name, "--check", "--config", "run.toml"])
    assert (again.exit_code, again.stdout) == (0, printed.stdout)
    assert sorted(path.name for path in elsewhere.iterdir()) == ["run.toml"]


def test_agents_and_orders_survive_check(elsewhere: Path) -> None:
    extra = [
        "--set",
        "agents.a.seats=['hinter', 'guesser']",
        "--set",
        "agents.a.learning.every=2",
        "--set",
        "update_order=[['a']]",
    ]
    printed = CliRunner().invoke(app, ["run", "guess", "--check", *extra, "--set", "replies=['say \"x\"', 'é\\n']"])
    (elsewhere / "run.toml").write_text(printed.stdout)
    again = CliRunner().invoke(app, ["run", "guess", "--check", "--config", "run.toml"])
    assert (again.exit_code, again.stdout) == (0, printed.stdout), again.output


@pytest.mark.timeout(240)
def test_a_full_disk_ends_the_run_with_a_reason_and_keeps_what_is_whole(elsewhere: Path) -> None:
    """A limit on file sizes stands for it: `metrics.jsonl` is the first to reach it."""
    with machine(elsewhere) as here:
        (elsewhere / "limited").write_text('#!/bin/bash\nulimit -f 16\nexec "$@"\n')
        (elsewhere / "limited").chmod(0o755)
        small = ("--rounds", "1000", "--set", "groups=1", "--set", "group_size=2", "--set", "evaluate_every=0")
        program = here.start("run", "guess", *SCRIPTED, *small, "--out", "run", through=(str(elsewhere / "limited"),))
        assert program.wait() == 1, program.story()
        said = program.err.read_text()
        assert said.startswith("failed: cannot use run/metrics.jsonl: File too large; raise the limit of the file size")
        assert "Traceback" not in said
        assert here.exit()["reason"] == "failed"
        rounds = [row["round"] for row in here.rows()]
        assert rounds == [round for round in range(1, len(rounds) // 2 + 1) for _ in range(2)]
        assert (elsewhere / "run/metrics.jsonl").read_text().endswith("}\n")
        here.assert_clean(program)


def test_no_command_of_ours_imports_torch_to_refuse(elsewhere: Path) -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom coordinator.cli.main import app\n"
        "print(CliRunner().invoke(app, ['run', 'guess', '--set', 'learning.loss=x']).exit_code, 'torch' in sys.modules)"
    )
    with machine(elsewhere) as here:
        program = here.python("-c", code)
        assert program.wait() == 0, program.story()
        assert program.out.read_text() == "2 False\n"
