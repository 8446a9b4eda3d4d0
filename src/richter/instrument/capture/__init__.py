"""The only folder that hooks or intercepts anything: one forward pass of a model that remembers what every linear map read and
where its output stands in the graph, so that any number of backward passes can compute ``g`` from it.

    with quiet(model):
        run = forward(model, x, state_of(model))
        g, _ = run.backward(V)          # d <V, f> / dz for every call of every map

Weights are replaced for the pass by aliases (same memory, no hooks, all requiring a gradient) and buffers by copies: the own
parameters, gradients, buffers and hooks of the model are never touched.

``state``: weights of a pass, and its inputs and outputs; ``quiet``: what is put back (weights, gradients, modes, random streams),
and detours around checkpoints and compiled code; ``attributes``: what modules keep, put back too; ``forward``: a pass;
``uses``: parameters as linear maps outside of known layers; ``recompute``: what a pass keeps, and blocks that run again instead.
"""

from richter.core.modules import unwrap
from richter.instrument.capture.attributes import BACKUP_BYTES, OF_TORCH, fingerprint, same_bits, weight_bytes
from richter.instrument.capture.forward import (
    TOGETHER,
    ByExample,
    Call,
    Direction,
    Pass,
    Product,
    batch_statistics,
    by_vmap,
    forward,
    index_of,
    pushed_forward,
    pushed_twice,
    raised_by_model,
    written,
)
from richter.instrument.capture.quiet import differentiable_twice, quiet
from richter.instrument.capture.recompute import Scale, Wanted, Weight, unkept
from richter.instrument.capture.state import (
    Inputs,
    Output,
    Own,
    State,
    check_finite,
    copy_of,
    count,
    device_of,
    moved_in_last_place,
    outputs_of,
    running_norms,
    select,
    state_of,
    to_device,
    understood,
)

__all__ = ["BACKUP_BYTES", "OF_TORCH", "TOGETHER", "ByExample", "Call", "Direction", "Inputs", "Output", "Own", "Pass",
           "Product", "Scale", "State", "Wanted", "Weight", "batch_statistics", "by_vmap", "check_finite", "copy_of", "count",
           "device_of", "differentiable_twice", "fingerprint", "forward", "index_of", "moved_in_last_place", "outputs_of",
           "pushed_forward", "pushed_twice", "quiet", "raised_by_model",
           "running_norms", "same_bits", "select", "state_of", "to_device",
           "understood", "unkept", "unwrap", "weight_bytes", "written"]
