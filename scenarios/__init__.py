"""Scenarios: one plays an episode at a table, and everything about it is here, for authors (`scenario`, `Table`, ...) and for hosts."""

from scenarios.episode import Identity, Limits, play_episode
from scenarios.errors import Dropped, Forfeit, Forfeited, RecordingError, ScenarioError
from scenarios.loading import load_scenario
from scenarios.recording import cuts, read_recordings, write_recordings
from scenarios.replay import replay
from scenarios.scenario import Evaluation, ForfeitScores, Scenario, Scores, ScriptedFunction, scenario
from scenarios.scripted import play_scripted
from scenarios.seat import Seat
from scenarios.table import Table
from scenarios.transcript import render
from scenarios.turns import Turns

__all__ = [
    "Dropped",
    "Evaluation",
    "Forfeit",
    "ForfeitScores",
    "Forfeited",
    "Identity",
    "Limits",
    "RecordingError",
    "Scenario",
    "ScenarioError",
    "Scores",
    "ScriptedFunction",
    "Seat",
    "Table",
    "Turns",
    "cuts",
    "load_scenario",
    "play_episode",
    "play_scripted",
    "read_recordings",
    "render",
    "replay",
    "scenario",
    "write_recordings",
]
