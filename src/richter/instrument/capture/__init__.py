"""The only folder that hooks or intercepts anything: one forward pass of a model that remembers what every linear map read and
where its output stands in the graph, so that any number of backward passes can compute ``g`` from it.

    with quiet(model):
        run = forward(model, x, state_of(model))
        g, _ = run.backward(V)          # d <V, f> / dz for every call of every map

Weights are replaced for the pass by aliases (same memory, no hooks, all requiring a gradient) and buffers by copies:
the model's own parameters, gradients, buffers and hooks are never touched.

``state``: what goes in and comes out; ``quiet``: what is put back, be it what modules keep (``remembered``, by ``kinds`` and
``iterators``) or weights and gradients (``guard``, ``originals``), while other threads wait (``gate``); ``detours`` around
checkpoints, compiled code and parametrisations; ``recorder``: the pass; ``calls``: what it leaves; ``anew``: what it keeps, and
blocks that are computed again instead, with a ``likeness`` of what they kept; ``uses`` of weights outside their module, which are
``products`` with ``parts`` of them; ``shortcuts`` in backward passes; ``tangents``: products with the Jacobian.
"""

from richter.core.modules import unwrap
from richter.instrument.capture.attributes import BACKUP_BYTES, same_bits, weight_bytes
from richter.instrument.capture.forward import (
    TOGETHER,
    Call,
    Direction,
    Pass,
    Product,
    batch_statistics,
    forward,
    index_of,
    pushed_forward,
    pushed_twice,
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

__all__ = ["BACKUP_BYTES", "TOGETHER", "Call", "Direction", "Inputs", "Output", "Own", "Pass", "Product", "Scale", "State",
           "Wanted", "Weight", "batch_statistics", "check_finite", "copy_of", "count", "device_of", "differentiable_twice",
           "forward", "index_of", "moved_in_last_place", "outputs_of", "pushed_forward", "pushed_twice", "quiet",
           "running_norms", "same_bits", "select", "state_of", "to_device", "understood", "unkept", "unwrap", "weight_bytes",
           "written"]
