"""Starts a coordinator and a task server on ipc sockets in DIRECTORY, as children that leave with it, and waits for their end."""

import os
import subprocess
import sys

DIRECTORY = sys.argv[1]
PROGRAM = [sys.executable, "-m", "coordinator.cli.main"]
PARENT = ["--parent", str(os.getpid())]
control, data = f"ipc://{DIRECTORY}/control", f"ipc://{DIRECTORY}/data"
server = ["taskserver", "--coordinator", control, "--engine", "scripted", "--data", data, "--name", "server"]
children = [
    subprocess.Popen([*PROGRAM, "coordinator", "--bind", control, *PARENT]),
    subprocess.Popen([*PROGRAM, *server, *PARENT]),
]
for child in children:
    child.wait()
