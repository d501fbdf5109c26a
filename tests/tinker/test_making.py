"""What a maker makes is what the class itself makes, and as frozen."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, field, fields, is_dataclass, replace
from typing import Any, get_args

import pytest

from tinker.protocol import Message
from tinker.protocol.making import changed, maker
from tinker.protocol.values import EpisodeId, Metric, Phase

EPISODE = EpisodeId(1, Phase.ROLLOUT, 2)


@pytest.mark.parametrize("cls", get_args(Message), ids=lambda cls: cls.__name__)
def test_every_message_is_made_with_its_fields_in_their_places(cls: Any) -> None:
    assert is_dataclass(cls)
    values = [f"value {number}" for number, _ in enumerate(fields(cls))]
    made = maker(cls)(*values)
    assert type(made) is cls and made == cls(*values) and repr(made) == repr(cls(*values))


def test_what_is_made_is_frozen_and_hashed_like_any_other() -> None:
    made = maker(EpisodeId)(1, Phase.ROLLOUT, 2)
    assert hash(made) == hash(EPISODE) and made < EpisodeId(1, Phase.ROLLOUT, 3)
    with pytest.raises(FrozenInstanceError):
        made.round = 2  # type: ignore[misc]
    with pytest.raises((AttributeError, TypeError)):
        object.__setattr__(made, "more", 2)  # it has slots and no more


def test_fields_may_have_any_name() -> None:
    assert maker(Metric)("name", 0.5) == Metric("name", 0.5)  # one is called `value`


@dataclass(frozen=True, slots=True)
class Checked:
    number: int

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError("negative")


@dataclass(frozen=True, slots=True)
class Counted:
    name: str = "n"
    counts: dict[str, int] = field(default_factory=dict)


def test_a_class_that_does_more_than_to_set_fields_stays_as_it_is() -> None:
    assert maker(Checked) is Checked


def test_defaults_are_those_of_the_class_unless_one_is_made_anew_each_time() -> None:
    hinted = maker(EpisodeId)
    with pytest.raises(TypeError):
        hinted(1, Phase.ROLLOUT)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        maker(Counted)("n")
    assert maker(Counted)("n", {}) == Counted("n")


def test_a_changed_copy_is_that_of_replace_and_as_frozen() -> None:
    after = changed(EPISODE, index=5, round=7)
    assert after == replace(EPISODE, index=5, round=7) and type(after) is EpisodeId and EPISODE.index == 2
    with pytest.raises(FrozenInstanceError):
        after.round = 2  # type: ignore[misc]


def test_a_field_that_is_not_there_and_a_class_that_checks_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        changed(EPISODE, number=1)
    with pytest.raises(TypeError, match=r"dataclasses\.replace"):
        changed(Checked(1), number=-1)
