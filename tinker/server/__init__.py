"""The task server: a process that owns devices and hosts resource pools."""
