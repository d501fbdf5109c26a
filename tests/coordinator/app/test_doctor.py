"""`opentinker doctor` says of each thing whether it is well, and what to do if it is not."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.app import doctor
from coordinator.app.doctor import Line, examine
from coordinator.cli.main import app


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def looked(look: Iterator[Line]) -> Line:
    (line,) = look
    return line


def test_this_machine_can_run(tmp_path: Path) -> None:
    lines = list(examine(tmp_path))
    assert [line for line in lines if line.state == "problem"] == []
    assert {"python", "package names", "packages", "training", "threads", "memory", "disk", "sglang", "hub"} <= {
        line.what for line in lines
    }
    assert all(line.do for line in lines if line.state != "ok")


def test_the_exit_code_and_json_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    well = CliRunner().invoke(app, ["doctor", "--json"])
    assert well.exit_code == 0
    assert {tuple(line) for line in json.loads(well.output)} == {("state", "what", "found", "do")}
    monkeypatch.setattr(doctor, "LEAST_MEMORY", 1 << 60)
    ill = CliRunner().invoke(app, ["doctor"])
    assert ill.exit_code == 1
    assert "problem memory: " in ill.output


def test_a_port_in_use_is_named_with_the_option_that_chooses_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(doctor, "PORTS", {port: "coordinator --bind"})
        line = looked(doctor._ports())
    assert (line.state, line.what) == ("note", f"port {port}")
    assert "opentinker coordinator --bind" in line.do


def test_a_full_disk_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LEAST_DISK", 1 << 60)
    assert looked(doctor._disk(tmp_path)).state == "problem"


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "NEEDED", ("anyio", "no-such-distribution"))
    monkeypatch.setattr(doctor, "TRAINING", ("no-such-distribution",))
    needed, training = looked(doctor._packages()), looked(doctor._training())
    assert (needed.state, needed.found) == ("problem", "missing: no-such-distribution")
    assert training.state == "note"
    assert "not train" in training.found


def test_a_torch_that_cannot_be_imported_is_a_problem_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "TORCH", "raise OSError('libtorch.so is broken')")
    line = looked(doctor._torch())
    assert line.state == "problem"
    assert "libtorch.so is broken" in line.found


def test_another_distribution_with_our_names_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "clashes", lambda: ["the package 'tinker' is also provided by x. Remove it"])
    line = looked(doctor._clashes())
    assert (line.state, line.do) == ("problem", "Remove it")


def test_a_hub_that_does_not_answer_is_worth_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(doctor, "HUB", "http://127.0.0.1:9")
    line = looked(doctor._hub())
    assert line.state == "note"
    assert "cannot be reached" in line.found
