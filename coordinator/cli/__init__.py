"""The one console command, `opentinker`."""
