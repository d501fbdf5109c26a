"""Text to token ids and back without torch or transformers: the tokenizer, the chat template, and checks of a model directory."""

from tinker.tokens.chat_template import ChatTemplate
from tinker.tokens.errors import TokenizerError
from tinker.tokens.model_dir import ModelFacts, check_fits, check_model_dir
from tinker.tokens.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "ModelFacts", "Tokenizer", "TokenizerError", "check_fits", "check_model_dir"]
