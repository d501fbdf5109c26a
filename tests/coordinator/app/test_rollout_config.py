"""`[rollout]`: what can be refused is refused before anything is started, in words that say what to do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from coordinator.app.checks import checked
from coordinator.app.config import ConfigError, assignment, config_text, merged, read_toml, resolve, rollout_of
from scenarios.library import library
from tinker.engines.sglang import Launch, ServerKeys, Servers, Transfer

HERE = {"scenario": "guess", "rollout": {"engine": "sglang", "launch": {"python": sys.executable}}}


def rollout(**given: Any) -> dict[str, Any]:
    return {"scenario": "guess", "rollout": {"engine": "sglang", **given}}


def test_nothing_is_said_and_the_engine_answers() -> None:
    assert resolve({"scenario": "guess"}).rollout.engine == ""


def test_running_servers_need_their_addresses_and_keys_come_from_the_environment() -> None:
    config = resolve(rollout(url=["http://gpu1:30000"], transfer="tensors", full_replicas=2)).rollout
    environment = {"OPENTINKER_SGLANG_KEY": "a", "OPENTINKER_SGLANG_ADMIN_KEY": "b"}
    assert config.servers(environment) == Servers(
        ("http://gpu1:30000",), None, Transfer.TENSORS, 2, ServerKeys("a", "b")
    )


def test_without_addresses_servers_are_launched() -> None:
    launch = {"python": "p", "replicas": 2, "ports": [31000, 31001], "threads": 3, "arguments": ["--x"]}
    servers = resolve(rollout(launch=launch)).rollout.servers({})
    assert servers.launch == Launch(python="p", replicas=2, ports=(31000, 31001), threads=3, arguments=("--x",))
    assert servers.urls == ()


def test_the_defaults_of_the_configuration_are_those_of_the_engine() -> None:
    assert resolve(rollout()).rollout.servers({}) == Servers(launch=Launch())


def test_the_resolved_configuration_is_one_that_a_task_server_reads(tmp_path: Path) -> None:
    config = resolve(rollout(url=["http://gpu1:30000"]))
    (tmp_path / "config.toml").write_text(config_text(config))
    assert rollout_of(read_toml(tmp_path / "config.toml"), "torch") == config.rollout


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"url": ["gpu1:30000"]}, "rollout.url: 'gpu1:30000' is no address"),
        ({"url": ["http://a:1", "http://a:1"]}, "an address is named twice"),
        ({"url": ["http://a:1"], "launch": {"replicas": 2}}, "not both"),
        ({"launch": {"ports": [1], "replicas": 2}}, "rollout.launch.ports: 1 for 2 replicas"),
        ({"launch": {"batch_adapters": 1}}, "rollout.launch.batch_adapters"),
        ({"engine": "vllm"}, "rollout.engine"),
        ({"transfer": "rdma"}, "rollout.transfer"),
        ({"launch": {"pyton": "p"}}, "rollout.launch.pyton: unknown key"),
    ],
)
def test_a_wrong_value_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(rollout(**given))


@pytest.mark.parametrize(
    ("assigned", "message"),
    [
        ("engine='scripted'", "trains no adapters"),
        ("rollout.launch.python='no/such/python'", "make sglang"),
        ("learning.rank=64", "learning.rank: rank 64, but rollout.launch.max_rank is 32"),
        ("agents.hinter.learning.rank=33", "rank 33, but"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_anything_is_started(assigned: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(library()["guess"], [merged(HERE, assignment(assigned))], local=True)


def test_servers_that_run_elsewhere_need_no_interpreter_here() -> None:
    config, _ = checked(library()["guess"], [rollout(url=["http://gpu1:30000"])], local=True)
    assert config.rollout.url == ("http://gpu1:30000",)
