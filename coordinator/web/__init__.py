"""The coordinator over HTTP, for people and monitors: health, metrics, status. It reads the core and changes nothing."""
