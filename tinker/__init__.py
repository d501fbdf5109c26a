"""The machinery under OpenTinker: messages, actors, transports, tokens, resource pools, engines, algorithms."""

__version__ = "0.1.0"
