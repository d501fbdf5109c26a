"""What is wrong with a model directory's tokenizer or chat template; found before any weights are read."""

from __future__ import annotations


class TokenizerError(Exception):
    """The model directory (or bundle) cannot be used. The message says what was found, what was expected, and what to do."""
