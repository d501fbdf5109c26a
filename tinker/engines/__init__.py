"""Engines: what a worker runs on. `scripted` needs no model; `torch` is the embedded one."""
