"""What an operator installs and reads: the units, the compose file, the page about operations."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from coordinator.app.daemon import Daemon
from coordinator.cli.main import app
from coordinator.core.coordinator import Coordinator
from coordinator.web import metrics, taskserver
from coordinator.web.server import application
from tinker.protocol.values import PeerName
from tinker.runtime.clock import ManualClock
from tinker.runtime.transport import MemoryNetwork

ROOT = Path(__file__).parents[2]
UNITS = sorted((ROOT / "deploy").glob("*.service"))
OPERATIONS = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
COMMANDS: Any = typer.main.get_command(app).commands  # type: ignore[attr-defined]
INSTALLED = "/opt/opentinker/.venv/bin/opentinker"


def settings(unit: Path) -> dict[str, str]:
    lines = [line.partition("=") for line in unit.read_text().splitlines() if "=" in line and line[0] != "#"]
    return {name: value for name, _, value in lines}


def grace(words: list[str]) -> float:
    """The grace time of a daemon's command line, after checking that the daemon takes it."""
    context = COMMANDS[words[0]].make_context(words[0], words[1:])
    return float(context.params["grace"])


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_has_nothing_to_say_about_a_unit(unit: Path, tmp_path: Path) -> None:
    program = tmp_path / "opentinker"
    program.symlink_to(sys.executable)
    for each in UNITS:
        (tmp_path / each.name).write_text(each.read_text().replace(INSTALLED, str(program)))
    name = unit.name.replace("@.", "@one.")
    if name != unit.name:
        (tmp_path / name).symlink_to(tmp_path / unit.name)
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / name], capture_output=True, text=True, check=False
    )
    said = [line for line in verified.stderr.splitlines() if str(tmp_path) in line or unit.name in line]
    assert (verified.returncode, said) == (0, [])


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_starts_a_daemon_and_outwaits_its_grace(unit: Path) -> None:
    words = shlex.split(settings(unit)["ExecStart"].replace("${THREADS}", "0"))
    assert words[0] == INSTALLED
    assert seconds(settings(unit)["TimeoutStopSec"]) > grace(words[1:]) + 5
    assert settings(unit)["RestartPreventExitStatus"] == "2"


def test_the_services_of_the_compose_file_start_daemons_and_outwait_their_grace() -> None:
    yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")
    services = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]
    assert {service["command"][1] for service in services.values()} == {"coordinator", "taskserver"}
    for service in services.values():
        assert service["command"][0] == "opentinker"
        assert seconds(service["stop_grace_period"]) > grace(service["command"][1:]) + 5
    assert services["taskserver"]["network_mode"] == "service:coordinator"


def test_every_metric_is_explained_with_its_labels_and_no_other() -> None:
    rows = [line.split("|") for line in OPERATIONS.splitlines() if line.startswith("| `opentinker_")]
    explained = {row[1].strip().strip("`"): row[2].strip() for row in rows}
    known = sorted([*metrics.names(), *taskserver.names()])
    assert sorted(explained) == known
    for each in (*metrics.READINGS, *taskserver.READINGS):
        assert explained[each.shown] == ", ".join(each.labels)
    assert set(re.findall(r"`(opentinker_\w+)`", OPERATIONS)) <= set(known)


async def test_every_page_is_explained() -> None:
    daemon = Daemon(Coordinator(PeerName("coordinator")), MemoryNetwork().listen("coordinator"), ManualClock())
    routes = [*application(daemon).routes, *taskserver.application(lambda: None).routes]
    paths = [route.path for route in routes]  # type: ignore[attr-defined]
    assert [path for path in paths if f"| `{path}` |" not in OPERATIONS] == []


def test_every_file_for_deployment_is_named() -> None:
    files = sorted(path.name for path in (ROOT / "deploy").iterdir())
    assert [name for name in files if f"`{name}`" not in OPERATIONS] == []
