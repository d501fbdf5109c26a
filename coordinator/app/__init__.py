"""Composition: configuration, daemons, the run directory, the terminal."""
