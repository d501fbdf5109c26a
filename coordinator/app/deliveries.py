"""How played episodes travel from a further host to the learner host: as bundles on the data plane, one file each, under their digest.

A further host stores them at the task server that serves the run, so that they outlive it, and no host needs to listen anywhere. The name
begins with the run's (the end of a run removes it) and the phase's (so does the beginning of the next phase), and holds the digest of what
is inside: the same episodes are never stored twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from scenarios import Scenario
from tinker.pools.played import played_bundles
from tinker.protocol.episodes import Episode, Recording
from tinker.protocol.to_host import Delivered
from tinker.protocol.values import Dealt, Ended, EpisodeId, RunId
from tinker.runtime.bundles import digest_of
from tinker.runtime.codec import WireError, decode, encode


def packed(episodes: Sequence[Episode]) -> dict[str, bytes]:
    """The files of a bundle. An episode that cannot travel goes as failed, with the reason."""
    return {_file(each.episode): _encoded(each) for each in episodes}


def bundle_of(run: RunId, deal: Dealt, files: Mapping[str, bytes]) -> str:
    """Its name."""
    return f"{played_bundles(run, deal.round, deal.phase)}{digest_of(files)[:32]}"


def unpacked(delivered: Delivered, files: Mapping[str, bytes], scenario: Scenario) -> list[Episode]:
    """The episodes that were promised. One that is missing, or is not what it should be, counts as failed."""
    return [_decoded(delivered, each, files.get(_file(each)), scenario) for each in delivered.episodes]


def _file(episode: EpisodeId) -> str:
    return f"{episode.index:08d}.episode"


def _encoded(episode: Episode) -> bytes:
    try:
        return encode(episode)
    except WireError as error:
        reason = f"this episode cannot travel from its host to the learner host: {error}"
        recording = replace(episode.recording, lines=(), ended=Ended.FAILED, scores=(), reason=reason, params="{}")
        return encode(Episode(episode.episode, episode.group, Ended.FAILED, (), (), (), recording))


def _decoded(delivered: Delivered, id: EpisodeId, data: bytes | None, scenario: Scenario) -> Episode:
    wrong = "it is missing"
    if data is not None:
        try:
            episode: Episode = decode(data, Episode)
        except WireError as error:
            wrong = str(error)
        else:
            if episode.episode == id and episode.group == delivered.deal.group:
                return episode
            wrong = f"it is episode {episode.episode} of group {episode.group}"
    reason = f"host {delivered.host} delivered no episode {id}: {wrong[:500]}"
    recording = Recording(
        delivered.run, id, scenario.name, scenario.version, "", "{}", (), (), Ended.FAILED, (), reason
    )
    return Episode(id, delivered.deal.group, Ended.FAILED, (), (), (), recording)
