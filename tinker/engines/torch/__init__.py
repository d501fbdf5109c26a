"""The embedded engine: one process, one base model, many LoRA adapters in one batch. Importing this imports torch."""

from tinker.engines.torch.engine import TorchEngine

__all__ = ["TorchEngine"]
