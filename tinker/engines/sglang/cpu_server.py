"""Starts SGLang's own HTTP server on a machine without a GPU, for trying things out and for tests. Run by another interpreter, as a script.

SGLang is made for accelerators. Three things stand in for what its CPU side misses here; nothing of SGLang itself is changed:

1. torchvision is imported by SGLang for pictures and comes linked against CUDA, so beside a CPU build of torch its compiled half is missing
   and its Python half finds two operators undeclared. They are declared here, without an implementation.
2. `sgl_kernel` has no CPU build on PyPI. A module of that name STANDS IN FOR IT: it has the names that SGLang imports on a CPU, all for
   speculative decoding, and each raises when it is called.
3. Adapters are kept in pinned memory, which only exists beside an accelerator; pinning does nothing here.

The processes that SGLang starts (multiprocessing, spawn) run this file's top level again, so these hold there, too.
"""

from __future__ import annotations

import functools
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # read when SGLang is imported

import torch

UNDECLARED = ("nms", "qnms")
NOT_ON_A_CPU = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)
FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "tensor", "zeros")


def declare_operators() -> torch.library.Library:
    """Stand-in 1. The declarations live as long as what is returned."""
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in UNDECLARED:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    return library


def stand_in_for_kernels() -> None:
    """Stand-in 2."""
    module = types.ModuleType("sgl_kernel", "A stand-in: nothing of it works.")
    module.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None)
    for name in NOT_ON_A_CPU:
        setattr(module, name, functools.partial(_not_here, name))
    sys.modules["sgl_kernel"] = module


def pin_nothing() -> None:
    """Stand-in 3."""
    for name in FACTORIES:
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def _not_here(name: str, *args: Any, **kwargs: Any) -> None:
    raise NotImplementedError(f"sgl_kernel.{name} is a stand-in: speculative decoding does not work on this CPU")


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made


_declared = declare_operators() if torch.version.cuda is None else None
stand_in_for_kernels()
pin_nothing()


def main(arguments: list[str]) -> None:
    """Serve until told to stop; then nothing is left."""
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        launch_server(prepare_server_args(arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
