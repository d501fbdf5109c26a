"""A host's side of the control connection: submit a run, arrive at barriers, open turns, run operations."""

from tinker.client.client import Client, Event
from tinker.client.waiters import ClientError, CoordinatorLost, OperationError, RunOver, TurnError

__all__ = ["Client", "ClientError", "CoordinatorLost", "Event", "OperationError", "RunOver", "TurnError"]
