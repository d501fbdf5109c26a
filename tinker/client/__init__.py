"""A host's side of the control connection: submit a run, arrive at barriers, open turns, run operations."""

from tinker.client.client import Client
from tinker.client.waiters import ClientError, CoordinatorLost, OperationError, RunOver, TurnError

__all__ = ["Client", "ClientError", "CoordinatorLost", "OperationError", "RunOver", "TurnError"]
