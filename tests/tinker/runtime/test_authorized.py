"""The file of authorized keys: what a line says, what is wrong with one, and who gets in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinker.protocol.values import PeerName, Role, RunId
from tinker.runtime.authorized import AuthorizedKeys, parse_authorized
from tinker.runtime.keys import KeyFileError
from tinker.runtime.transport import new_keys

FILE = Path("authorized")
ANN, BOB = new_keys(), new_keys()


def test_a_line_says_roles_name_and_runs() -> None:
    text = f"# people\n\n{ANN.public} host,viewer ann runs=exp-*,try-?\n  {BOB.public}   taskserver bob\n"
    ann, bob = parse_authorized(text, FILE).values()
    assert (ann.roles, ann.name) == ((Role.HOST, Role.VIEWER), "ann")
    assert [ann.allows(RunId(run)) for run in ("exp-1", "try-2", "try-22", "prod")] == [True, True, False, False]
    assert bob.allows(RunId("anything"))
    assert [ann.names(PeerName(name)) for name in ("ann", "ann-7", "anna", "an")] == [True, True, False, False]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (f"{ANN.secret} host ann", "the first word is no public key"),
        (f"{ANN.public} boss ann", "unknown role 'boss'; there are host, taskserver"),
        (f"{ANN.public} host", "2 words; expected PUBLICKEY"),
        (f"{ANN.public} host ann runs=", "the fourth word must be runs=glob,glob"),
        (f"{ANN.public} host ann only=x", "not 'only'"),
        (f"{ANN.public} host ../ann", "is no name"),
        (f"{BOB.public} host bob", "on an earlier line, too"),
    ],
    ids=["secret key", "unknown role", "too few words", "empty runs", "unknown word", "bad name", "twice"],
)
def test_a_wrong_line_is_named_and_no_secret_repeated(line: str, says: str) -> None:
    with pytest.raises(KeyFileError) as caught:
        parse_authorized(f"{BOB.public} host bob\n# x\n{line}\n", FILE)
    assert str(caught.value).startswith("authorized, line 3: ")
    assert says in str(caught.value)
    assert ANN.secret not in str(caught.value)


def test_the_data_connection_is_for_hosts_and_task_servers(tmp_path: Path) -> None:
    file = tmp_path / "authorized"
    file.write_text(f"{ANN.public} player,viewer ann\n{BOB.public} host bob\n")
    keys = AuthorizedKeys.read(file)
    guard = keys.only(Role.HOST, Role.TASKSERVER)
    assert keys.admit(ANN.public) is not None
    assert guard.admit(ANN.public) is None
    assert guard.admit(BOB.public) == keys.admit(BOB.public)
    assert guard.admit(new_keys().public) is None
    assert keys.refused == {"wrong role": 1, "unknown key": 1}
