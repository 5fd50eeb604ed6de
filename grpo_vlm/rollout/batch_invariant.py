"""Makes a CPU server's log-probs independent of what else is in the batch, so that the same seed gives the same bits
whatever the order of the requests, a retry or a restart.

Measured with vLLM 0.26: equal token ids, but log-probs that differed by up to 2.4e-6, wherever a step held a single
token (one prompt with n = 1, or the last completion of a batch). oneDNN multiplies a matrix of one row with another
kernel than one of several rows (below AVX-512: of up to three rows). MKL, which vLLM uses for the patches of images,
does so up to fifteen rows; its own switch is MKL_CBWR=AVX2,STRICT in the server's environment (command.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ROWS = 4  # from here on oneDNN takes the same kernel


def make_batch_invariant() -> None:
    """Let oneDNN never see fewer than ROWS rows. Called by our vLLM plugin in each process of a CPU server."""
    from vllm import _custom_ops as ops

    whole = ops.onednn_mm

    def onednn_mm(handler: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.numel() // handler.k
        if not 0 < rows < ROWS:
            return whole(handler, x, bias)
        padded = x.new_zeros(ROWS, handler.k)
        padded[:rows] = x.reshape(rows, handler.k)
        return whole(handler, padded, bias)[:rows].reshape(*x.shape[:-1], handler.n)

    ops.onednn_mm = onednn_mm
