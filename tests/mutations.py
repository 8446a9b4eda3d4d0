"""Break one line of the instrument at a time: do the tests notice?

    python tests/mutations.py                     every mutation; a table of what caught it
    python tests/mutations.py -k recorder         those whose file or description contains this
    python tests/mutations.py --jobs 2 --first    two at a time, and only the tests that are named with each

Each mutation is applied to a copy of ``src``, which stands first on PYTHONPATH, and the quick tests run until one fails: first
those that are named with it, then all of ``TESTS``. One that no test can notice says why in ``equivalent``.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TESTS = ("audit", "uses", "splits", "recurrent", "mutants", "renewal", "chunks", "routing", "conformance", "exactness", "masks",
         "tokens", "precision", "stateful", "threads", "costs", "bad_input", "knobs", "identity", "laws")
ROOT = Path(__file__).parent.parent
SECONDS = 900  # that one run of tests may take; a test that never ends has noticed


@dataclass(frozen=True)
class Mutation:
    """A plausible mistake: ``text``, which stands once in a function, becomes something else."""

    file: str  # below src/richter
    function: str  # qualified name of the function, class or constant; empty: a statement without a name
    text: str
    becomes: str
    breaks: str
    tests: tuple[str, ...]  # the likeliest to notice: "audit" is tests/instrument/test_audit.py, "audit::x" is test_x in it
    equivalent: str = ""  # why nothing that anybody can see is different

    @property
    def name(self) -> str:
        return f"{self.file}: {self.breaks}"

    @property
    def source(self) -> Path:
        return ROOT / "src" / "richter" / self.file

    def applied(self, source: str) -> str:
        """Return the source with the mistake in it; ValueError if its function or its text is not there, or not once."""
        places = definitions(source)
        if self.function and self.function not in places:
            holders = [name for name, (a, b) in places.items() if self.text in "".join(source.splitlines(True)[a:b])]
            raise ValueError(f"{self.file} has no {self.function}; its text stands in: {', '.join(holders) or 'nothing'}")
        begin, end = places[self.function] if self.function else (0, None)
        lines = source.splitlines(True)
        part = "".join(lines[begin:end])
        if (count := part.count(self.text)) != 1:
            raise ValueError(f"{self.text!r} stands {count} times in {self.file}::{self.function}")
        return "".join((*lines[:begin], part.replace(self.text, self.becomes), *(lines[end:] if end else ())))


@dataclass(frozen=True)
class Outcome:
    mutation: Mutation
    caught: str  # by which test; empty: it survived
    seconds: float


def mutation(place: str, breaks: str, text: str, becomes: str, *tests: str, equivalent: str = "") -> Mutation:
    """Make a mutation; ``place`` is ``file::function``, so that moves inside a file do not matter."""
    file, _, function = place.partition("::")
    return Mutation(file, function, text, becomes, breaks, tests, equivalent)


@cache
def definitions(source: str) -> dict[str, tuple[int, int]]:
    """First and last line (from 0, the last one excluded) of functions, classes and constants, by qualified name."""
    places: dict[str, tuple[int, int]] = {}

    def visit(body: Sequence[ast.stmt], inside: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                begin = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                places[inside + node.name] = (begin - 1, node.end_lineno or begin)
                visit(node.body, f"{inside}{node.name}.")
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and not inside:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name):
                        places[target.id] = (node.lineno - 1, node.end_lineno or node.lineno)

    visit(ast.parse(source).body, "")
    return places


MAPS = "exactness::feature_correlations_are_those_of_the_definition"
KERNELS = "exactness::tangent_kernels_are_products_of_jacobians"
LAYERS = "recurrent::layers_in_parts_compute_what_torch_does"
CAPTURE, SURVEY = "instrument/capture", "instrument/survey"

MUTATIONS = [
    # ------------------------------------------------------------------------------------------------------------ recorder
    mutation(f"{CAPTURE}/forward.py::Call.inputs", "an input that is changed in place is read as it is afterwards",
             "if self.read._version != self.version:", "if self.read._version < self.version:", "mutants", MAPS),
    mutation(f"{CAPTURE}/forward.py::Pass.backward", "twice the cotangents are asked",
             "V.to(self.f.dtype).reshape(self.f.shape)", "2 * V.to(self.f.dtype).reshape(self.f.shape)", KERNELS),
    mutation(f"{CAPTURE}/forward.py::Pass.backward", "what a model adds to .grad in its backward pass is left out",
             "[d + added[id(t)] if id(t) in added else d for", "[d for", "audit"),
    mutation(f"{CAPTURE}/forward.py::Recorder._module_called",
             "a view that a module returns is not copied, and an in-place change of it cuts the graph",
             "elif z._is_view():", "elif not z._is_view():", "mutants", MAPS),
    mutation(f"{CAPTURE}/forward.py::Recorder.__enter__", "the hook comes behind those of the user, which change the output",
             "self._end, with_kwargs=True, prepend=True, always_call=True)", "self._end, with_kwargs=True, always_call=True)",
             "identity::hooks_that_change_the_function_are_part_of_it"),
    mutation(f"{CAPTURE}/forward.py::Recorder._used", "axes are put back by the permutation, not by its inverse",
             "permute([use.order.index(i) for i in range(z.dim())])", "permute(use.order)", "mutants"),
    mutation(f"{CAPTURE}/forward.py::Recorder.__exit__",
             "hooks stay on the model", "        with self._hooks:\n", "        if self._hooks:\n",
             "stateful::hooks_are_removed_after_every_forward_pass"),
    mutation(f"{CAPTURE}/forward.py::Recorder.derived", "a model that differentiates is taken for one that does not",
             "        self.differentiates = True\n", "", "mutants"),
    # ---------------------------------------------------------------------------------------------------------------- anew
    mutation(f"{CAPTURE}/recompute.py::Scale._placed", "tensors kept for backward passes are counted if they are weights",
             "untyped_storage())) not in self._weights:", "untyped_storage())) in self._weights:",
             "recompute::what_is_kept_is_weighed"),
    mutation(f"{CAPTURE}/recompute.py::CheckpointBlock.again", "a block is run again with the model's own weights",
             "self.state.in_place(),", "", "recompute::blocks_run_again_with_the_weights_of_their_pass"),
    mutation(f"{CAPTURE}/recompute.py::CheckpointBlock.again", "what a block draws when it is run again is drawn anew",
             "borrowed(self.state.model, self.drawn)", "borrowed(self.state.model)",
             "recompute::what_was_drawn_is_drawn_again"),
    mutation(f"{CAPTURE}/recompute.py::CheckpointBlock.again", "an input of a block that is changed in place is not noticed",
             "if any(t._version != version for t, version in self.versions):", "if False:",
             "recompute::a_block_that_differs_is_an_error"),
    mutation(f"{CAPTURE}/recompute.py::Room.kept", "what one block keeps is taken for what another keeps",
             "if self._of != block.number:", "if self._of < 0:", "recompute::what_was_drawn_is_drawn_again"),
    mutation(f"{CAPTURE}/recompute.py::Scale.weight", "blocks that write into what they are given are computed again",
             ".size <= limit)} - written", ".size <= limit)}", "recompute::blocks_that_write_into_what_they_are_given_are_kept"),
    mutation(f"{CAPTURE}/recompute.py::CheckpointBlock.again",
             "a block that computes other numbers the second time is taken as it is",
             "if not alike(self.kept, second):", "if False:", "recompute::a_block_that_differs_is_an_error"),
    mutation(f"{CAPTURE}/forward.py::forward", "blocks that run again refer to the graph, which is never let go",
             "calls, recorder.calls, recorder.products, recorder.scope.copies = recorder.calls, [], None, {}",
             "calls = recorder.calls", "recompute::a_graph_is_let_go"),
    # --------------------------------------------------------------------------------------------------------------- state
    mutation(f"{CAPTURE}/state.py::State.in_place", "aliases stay in the model", "box[attribute] = value", "value.detach()",
             "identity::settings"),
    mutation(f"{CAPTURE}/state.py::State.accumulated", "what was added to .grad is counted again by the next pass",
             "                weight.grad = None", "                pass", "audit"),
    mutation(f"{CAPTURE}/state.py::state_of", "a parameter that the forward pass writes into is the model's own",
             "copied is None or name in copied or", "copied is None or", "identity::settings"),
    mutation(f"{CAPTURE}/state.py::state_of", "buffers are the model's own", "state[name] = value.detach().clone()",
             "state[name] = value.detach()", "identity::what_a_model_remembers_is_not_of_the_probe", "identity::settings"),
    mutation(f"{CAPTURE}/state.py::State.computes_in",
             "the precision is the finest that is seen", "self.precision = max(", "self.precision = min(",
             "mutants", "splits", "precision"),
    mutation(f"{CAPTURE}/state.py::copy_of",
             "the model writes into the probe", "    return _each(x, Tensor.clone)\n", "    return x\n",
             "identity::the_probe_and_the_data_behind_it_stay_as_they_were"),
    mutation(f"{CAPTURE}/state.py::State.__init__", "aliases do not count as Parameters, and slices of lists are wrapped anew",
             ", _is_param=True)", ")", "trained"),
    mutation(f"{CAPTURE}/state.py::State.__init__", "what is written on a parameter is not read from its alias",
             "vars(weight).update(vars(box[attribute]), _is_param=True)", "vars(weight).update(_is_param=True)", "trained"),
    mutation(f"{CAPTURE}/state.py::Own.__init__", "the user's own hooks hear of the comparison",
             "if p.requires_grad and not p._backward_hooks}", "if p.requires_grad}", "trained"),
    mutation(f"{CAPTURE}/state.py::Own.accumulated", "the comparison takes what lies in the user's .grad",
             "        return {}\n", "        return super().accumulated()\n", "trained"),
    # -------------------------------------------------------------------------------------------------- trained
    mutation(f"{SURVEY}/examine.py::check_trained", "outputs with the model's own parameters are not compared",
             "if not _agree(plain.f, again.f):", "if False:", "trained"),
    mutation(f"{SURVEY}/examine.py::check_trained", "gradients with the model's own parameters are not compared",
             "if apart is not None:", "if False:", "trained"),
    mutation(f"{SURVEY}/examine.py::check_trained", "the comparison is made where a backward pass adds to the user's .grad",
             "    if verified.accumulates:", "    if False:", "trained", "audit"),
    mutation(f"{SURVEY}/examine.py::_first_apart", "rounding of one gradient is weighed against that gradient alone",
             "(d.norm() + e.norm()) + noise)", "(d.norm() + e.norm()))", "trained",
             equivalent="a second pass, as plain as the first, is what is judged by in the end, and it rounds alike"),
    mutation(f"{SURVEY}/examine.py::_relative", "zero outputs are compared by dividing by zero",
             "if size else math.inf", "if True else math.inf",
             "trained::a_model_that_does_something_else_with_aliases_is_refused"),
    mutation(f"{CAPTURE}/state.py::state_of", "initial weights are those of now", "value = p.detach() if initial is None else",
             "value = p.detach() if True else", "exactness"),
    mutation(f"{CAPTURE}/state.py::arguments", "a dict of inputs that forward does not name is passed by keyword",
             "by_name = all(k in accepted for k in x)", "by_name = any(True for k in x)", "mutants"),
    # --------------------------------------------------------------------------------------------------------------- quiet
    mutation(f"{CAPTURE}/quiet.py::_streams_kept",
             "numpy's stream is not put back", "np.random.set_state(numpy_state)", "np.random.get_state()",
             "stateful", "identity::settings"),
    mutation(f"{CAPTURE}/quiet.py::seeded",
             "the seed of the measurement is forgotten", "manual_seed(measured * 1_000_003 + seed)",
             "manual_seed(seed)", "knobs::a_knob_does_something", "mutants"),
    mutation(f"{CAPTURE}/quiet.py::seeded", "every example draws the same", "manual_seed(measured * 1_000_003 + seed)",
             "manual_seed(measured * 1_000_003)", "chunks", "mutants"),
    mutation(f"{CAPTURE}/quiet.py::_restore",
             "torch's streams are not put back", "generator.set_state(state)", "generator.get_state()",
             "identity::train_mode_draws_dropout_from_a_stream_of_its_own"),
    mutation(f"{CAPTURE}/quiet.py::_without_autocast",
             "autocast stays switched off", "torch.set_autocast_enabled(device, before)",
             "torch.set_autocast_enabled(device, False)", "identity::the_surroundings_change_no_number", "mutants",
             equivalent="leaving inference_mode(False), which is around it, puts back torch's dispatch keys, and autocast is "
                        "one of them"),
    mutation(f"{CAPTURE}/quiet.py::quiet",
             "train mode is eval mode", 'module.training = mode == "train"', "module.training = False",
             "bad_input::batch_norm_mixes_in_train_mode_only"),
    # ---------------------------------------------------------------------------------------------------------------- uses
    mutation(f"{CAPTURE}/uses.py::Scope._multiplied",
             "axes of a product are sorted the wrong way round", "role.sort(key=lambda k: -axes[k][1])",
             "role.sort(key=lambda k: axes[k][1])", "mutants"),
    mutation(f"{CAPTURE}/uses.py::Scope.looked_up",
             "a padding index that is counted from the end is not one", "padding_idx % len(weight)",
             "padding_idx", "mutants", "uses"),
    mutation(f"{CAPTURE}/uses.py::Scope._part", "a copy stands for the weight after it was written into",
             "if copy is not None and copy[1] == w._version:", "if copy is not None:", "mutants", "uses"),
    mutation(f"{CAPTURE}/uses.py::Scope.indexed",
             "negative indices read nothing", "torch.where(index < 0, index + len(table), index)",
             "index", "mutants", MAPS),
    mutation(f"{CAPTURE}/uses.py::Scope.copied", "a copy that rounds stands for the weight",
             "                and torch.finfo(z.dtype).eps <= torch.finfo(w.dtype).eps:", "                :", "mutants",
             "precision"),
    mutation(f"{CAPTURE}/uses.py::Scope._part", "a module's own product is seen twice",
             "or any(getattr(running, m.weight, None) is p for m in self.view(running).values())", "or False", MAPS),
    mutation(f"{CAPTURE}/uses.py::Scope.returned", "rows that a table returns as they are begin with its first",
             "first = part.offset // module.weight.stride(0)", "first = 0", "mutants", "uses", MAPS),
    mutation(f"{CAPTURE}/uses.py::Scope._name", "both ways of using one matrix have one name", "            if known == key:",
             "            if known is not None and known.offset == key.offset:", MAPS),
    mutation(f"{CAPTURE}/uses.py::Scope._multiplied", "a multiple of a weight reads what the weight does",
             "read if part.scale == 1 else read * part.scale", "read", "own_layers"),
    mutation(f"{CAPTURE}/uses.py::Scope._part",
             "a view of a weight is none of it in forward mode", "self.duals.get(id(base), base)", "base",
             "own_layers"),
    # --------------------------------------------------------------------------------------------------------------- parts
    mutation(f"{CAPTURE}/uses.py::merged", "axes that do not follow each other are one",
             "if result and result[-1][1] == length * stride:", "if result and result[-1][1] >= length * stride:", "mutants"),
    mutation(f"{CAPTURE}/uses.py::ParameterPart.distinct",
             "an entry that stands twice in a part counts as two", "if stride <= reach:",
             "if stride < reach:", "mutants", "uses"),
    mutation(f"{CAPTURE}/uses.py::as_map.matrix", "a parameter in the middle of a larger memory is read from its beginning",
             "w.storage_offset() + offset)", "offset)", "mutants", MAPS),
    mutation(f"{CAPTURE}/uses.py::key_of_map", "every part begins where the parameter does",
             "Key(m.kind, int(matrix.storage_offset()),", "Key(m.kind, 0,", "mutants", MAPS),
    # ------------------------------------------------------------------------------------------------------------ products
    mutation(f"{CAPTURE}/uses.py::_einsum", "an einsum without an arrow gives its letters as they come",
             "letters = [k for k in sorted(left)", "letters = [k for k in left", "mutants", MAPS),
    mutation(f"{CAPTURE}/uses.py::_einsum",
             "ellipses are matched from the front", 'tuple(("dot", widest - m + i)', 'tuple(("dot", i)',
             "mutants", MAPS),
    mutation(f"{CAPTURE}/uses.py::_matmul", "leading axes of a product are matched from the front",
             "in_b = (*batch[len(batch) - max(q - 2, 0):]", "in_b = (*batch[:max(q - 2, 0)]", "mutants", MAPS),
    mutation(f"{CAPTURE}/uses.py::Scope.contracted",
             "a product that is multiplied by alpha is a plain one", ' or kwargs.get("alpha", 1) != 1',
             "", "mutants", "uses"),
    mutation(f"{CAPTURE}/uses.py::Scope.contracted",
             "a weight on the left is not seen", "((b, in_b, a, in_a), (a, in_a, b, in_b)):",
             "((b, in_b, a, in_a),):", "uses"),
    mutation(f"{CAPTURE}/uses.py::_tensordot",
             "an axis of tensordot that is counted from the end is labelled so", '("sum", i % p)',
             '("sum", i)', MAPS,
             equivalent="labels are only compared with each other, both operands get this one, and torch itself refuses an "
             "axis that is named twice"),
    # ----------------------------------------------------------------------------------------------------------- shortcuts
    mutation(f"{CAPTURE}/forward.py::Recorder.curved",
             "options of an activation are forgotten", "func(x, *args[1:], **kwargs))", "func(x))",
             "costs::derivatives_of_activations_are_computed_once", "mutants"),
    mutation(f"{CAPTURE}/forward.py::Silent.backward",
             "positions with negative gradients are silent", "(positions.abs().amax(-1) != 0)",
             "(positions.amax(-1) > 0)", "mutants"),
    mutation(f"{CAPTURE}/forward.py::Recorder.curved",
             "an activation in place gives a new tensor", "is None or in_place or not", "is None or not",
             "costs::an_activation_in_place_stays_in_place"),
    mutation(f"{CAPTURE}/forward.py::Recorder.linear", "weights that are computed get no gradient",
             "and all(t is None or t.grad_fn is None for t in args[1:]):", "and True:",
             "costs::a_weight_that_is_computed_is_not_skipped"),
    # ------------------------------------------------------------------------------------------------------------- detours
    mutation(f"{CAPTURE}/quiet.py::_branch", "the other branch is taken", "(true_fn if pred else false_fn)",
             "(false_fn if pred else true_fn)", "uses::forward_passes_of_another_kind_are_measured"),
    mutation(f"{CAPTURE}/quiet.py::Detour.taken", "a thread stays on the detour", "self._taken.reset(token)", "self._taken.get()",
             "threads::a_detour_is_taken_by_some_threads_only", "mutants", "threads"),
    mutation(f"{CAPTURE}/quiet.py::_computing_once.once.weight",
             "a parametrised weight is computed at every reading", "if name not in weights:", "if True:",
             "mutants", MAPS, "recurrent"),
    mutation(f"{CAPTURE}/quiet.py::parametrised_once",
             "modules keep the class of the pass", "module.__class__ = usual", "usual.mro()",
             "threads::weights_that_a_user_caches_stay_cached", "mutants", "identity::every_model_of_the_zoo"),
    mutation(f"{CAPTURE}/quiet.py::Detour._leave", "the first thread that leaves takes the detour away from the others",
             "if not self._threads and getattr", "if getattr", "threads::a_detour_is_taken_by_some_threads_only"),
    # ---------------------------------------------------------------------------------------------------------- remembered
    mutation(f"{CAPTURE}/attributes.py::Memory.restore", "what a forward pass registers stays",
             "            if box:\n                box.clear()", "            if box:\n                pass",
             "stateful::what_a_forward_pass_registers"),
    mutation(f"{CAPTURE}/attributes.py::OF_TORCH",
             "train and eval flags are left to torch", 'set(vars(nn.Module())) - {"training"}',
             "set(vars(nn.Module()))", "identity::modes_of_submodules_are_put_back_one_by_one",
             equivalent="all attributes of a module are put back, these too; this set says which of them hold boxes of "
             "torch's own, and a flag is no box"),
    mutation(f"{CAPTURE}/attributes.py::Memory.lend",
             "iterators are used up", "            put(key, double)", "            pass", "stateful"),
    mutation(f"{CAPTURE}/attributes.py::Memory.__init__", "attributes of classes are not put back", "self._add(keep_class(kind))",
             "keep_class(kind)", "stateful::what_is_kept_in_the_class"),
    mutation(f"{CAPTURE}/attributes.py::Memory._add", "of a long container nothing is put back",
             "(self._short if len(kept.values) <= LONG else self._long).append(kept)",
             "len(kept.values) > LONG or self._short.append(kept)", "mutants"),
    # --------------------------------------------------------------------------------------------------------------- guard
    mutation(f"{CAPTURE}/quiet.py::Guard.finish", "what is added to a gradient is not seen",
             "if p.grad is not grad or label in added]", "if p.grad is not grad]",
             "stateful::what_is_written_into_the_model_is_put_back_and_said"),
    mutation(f"{CAPTURE}/quiet.py::Guard._gradient_back", "a new gradient stays", "        p.grad = grad\n", "",
             "stateful::what_is_written_into_the_model_is_put_back_and_said"),
    mutation(f"{CAPTURE}/quiet.py::Guard.finish", "what another thread trained is undone", "and not (self.alone and alone()):",
             "and False:", "threads::a_step_of_training_in_the_middle_of_a_measurement_stays"),
    mutation(f"{CAPTURE}/forward.py::Recorder._end",
             "calls by other threads are captured", "if self._thread != threading.get_ident():",
             "if False:", "threads::calls_by_another_thread_are_not_captured"),
    mutation(f"{CAPTURE}/quiet.py::in_turn",
             "two measurements of one model run at once", "        _TURNS.wait_for(", "        bool(",
             "threads::two_threads_that_measure_one_model_take_turns"),
    mutation(f"{CAPTURE}/quiet.py::Guard.__init__",
             "buffers are not looked at", "originals({**weights, **buffers})", "originals(weights)",
             "stateful::what_is_written_into_the_model_is_put_back_and_said"),
    # --------------------------------------------------------------------------------------------------------------- audit
    mutation(f"{SURVEY}/audit.py::Check._cancel", "biases that are off by more than terms that cancel are accepted",
             "return all(far <= min(tol", "return all(True or far <= min(tol", "audit", "real_models", "mutants"),
    mutation(f"{SURVEY}/audit.py::rounding_errors",
             "one move tells any small gradient from a rounding error", "(share < STEADY and k in known)",
             "share < STEADY", "real_models::a_rounding_error_that_comes_back_when_the_weights_move_is_one_all_the_same"),
    mutation("instrument/stream.py::Chunk._rebuilt", "captures by vmap are not compared with autograd's gradients",
             "return all(rebuilt.error(w) <= tolerance(precision) for w in weights)", "return True", "vectorised"),
    mutation(f"{SURVEY}/audit.py::Check._agree",
             "gradients may be off by a hundred per cent", "all(off <= self._tolerance * size for",
             "all(off <= size for", "audit"),
    mutation(f"{SURVEY}/audit.py::Check.__init__",
             "all examples have the same weight", "torch.rand(self.n, generator=self.draw) + 0.5",
             "torch.ones(self.n)", "audit", "real_models"),
    mutation(f"{SURVEY}/audit.py::Check.finish",
             "the gradients of a chunk are compared with themselves", "self._mixed(here, apart)",
             "self._mixed(here, here)", "real_models"),
    mutation(f"{SURVEY}/audit.py::Check._beyond_rounding", "small gradients are all taken for rounding errors",
             "k not in faint or not rounded(k)", "k not in faint",
             "real_models::a_rare_example_of_a_layer_with_small_gradients"),
    mutation(f"{SURVEY}/audit.py::MOVES", "the weights are moved once only", "MOVES = 8", "MOVES = 1", "real_models"),
    mutation("instrument/statistics/movement.py::EPS_EFFECT", "any small effect is that of the eps of a norm", "EPS_EFFECT = 0.4",
             "EPS_EFFECT = 2.0", "movement"),
    mutation("instrument/statistics/movement.py::NetworkPair._unchanged",
             "the effect of eps is held against the outputs, not the layer's own",
             "SCALE_TOLERANCE * contribution.norm()", "SCALE_TOLERANCE * self.wide(f).norm()", "movement"),
    mutation("instrument/statistics/movement.py::NetworkPair.last", "a layer that grows without effect is not scaled back",
             "return _scaled(self.subject.state, self.scales) if self.scales else", "return", "movement"),
    mutation(f"{SURVEY}/audit.py::_as_surveyed",
             "how many rows a layer wrote is not compared", 'all(c.shape[layout == "second"] == n * r',
             'all(c.shape[layout == "second"] > 0', "audit", "mutants"),
    mutation(f"{SURVEY}/audit.py::check_calls", "a map that the first examples do not use is not missed later",
             "survey.note(name) in (None, Mark.IDLE)]", "survey.note(name) is None]", "audit"),
    mutation(f"{SURVEY}/audit.py::_ramp", "columns are known by their sum alone", ".mul_(0.754877).cos_()", ".mul_(0).add_(1)",
             "mutants"),
    mutation(f"{SURVEY}/audit.py::Check.add",
             "only the last block of cotangents is compared", "_combined(V, a, self.R)", "_combined(V, a)",
             "audit"),
    mutation(f"{SURVEY}/audit.py::Check.finish", "many blocks of cotangents are compared with nothing",
             "gradients(self.R.to(self.run.f.dtype)) if self.blocks > BLOCKS else None", "None",
             "audit::outputs_that_share_a_forward_pass_are_all_looked_at"),
    mutation(f"{SURVEY}/audit.py::Check._culprit", "the other half of the examples is searched",
             "(first, middle) if set(off) & set(wrong) else (middle, last)",
             "(middle, last) if set(off) & set(wrong) else (first, middle)", "real_models"),
    mutation(f"{SURVEY}/audit.py::Totals._parts",
             "of a weight that several maps divide, one is compared", "for k, c in called.items()]",
             "for k, c in list(called.items())[:1]]", "real_models", "audit"),
    mutation(f"{SURVEY}/audit.py::Totals.__init__", "a weight that this example uses in no map is not compared",
             "weights = [run.state[weight]] if weight else", "weights = [run.state[weight]] if weight and calls[name] else",
             "real_models::a_weight_that_a_rare_example_uses_without_its_layer_has_no_correlation"),
    # --------------------------------------------------------------------------------------------------------------- amend
    mutation(f"{SURVEY}/memo.py::amended", "the other uses of a weight in doubt are not read singly",
             "maps.keys() & with_siblings(maps, doubt.maps)", "maps.keys() & set(doubt.maps)", "audit", "mutants",
             equivalent="describe() reads all uses of a weight singly where one of them is, and the weights that are checked "
             "for mixing are the same"),
    mutation(f"{SURVEY}/memo.py::amended", "what is in doubt is not looked at again", "verify_one(one, [*missing, *doubted])",
             "verify_one(one, [*missing])", "mutants"),
    mutation(f"{SURVEY}/memo.py::amended", "what was read alone already is not refused",
             "    kept.refused |= {k: _unexplained(k) for k in failed}\n", "", "mutants"),
    mutation(f"{SURVEY}/memo.py::amended", "large batches may be mixed", "    _check_mixing(network, doubt, kept.singly)\n", "",
             "audit"),
    mutation(f"{SURVEY}/memo.py::Amendments.apply",
             "nothing is said of what is refused", "if k not in maps} | self.refused", "if k not in maps}",
             "mutants::what_is_in_doubt_is_looked_at_alone"),
    # -------------------------------------------------------------------------------------------------------------- verify
    mutation(f"{SURVEY}/examine.py::verify", "neighbours are on one side", "[i.bit_count() % 2 == 0 for i in range(n)]",
             "[i < n // 2 for i in range(n)]", "mutants"),
    mutation(f"{SURVEY}/examine.py::Tally.separate", "only one half must stay with its examples",
             "if first[~mine].norm() <= tol * first.norm() and second[mine].norm() <= tol * second.norm():",
             "if first[~mine].norm() <= tol * first.norm():", "mutants"),
    mutation(f"{SURVEY}/examine.py::_accepted", "gradients that are not rebuilt are accepted", "        elif error > tol:\n",
             "        elif error > 1e9 * tol:\n", "mutants"),
    mutation(f"{SURVEY}/examine.py::_accepted",
             "what serves to compute a weight is refused", "if error > tol and computed and names",
             "if False and names", "uses", MAPS, "bad_input"),
    mutation(f"{SURVEY}/examine.py::map_gradient",
             "the first row of a table has no gradient", "h.reshape(-1) >= 0", "h.reshape(-1) > 0", MAPS),
    mutation(f"{SURVEY}/examine.py::describe", "a weight that is read singly is rebuilt from batches too",
             " and not singly.intersection(own)}", "}", "audit"),
    mutation(f"{SURVEY}/examine.py::_is_sum", "a bias that is used elsewhere too has the gradient of its layer",
             "total.shape == exact.shape and bool((total - exact).norm() <= tol * size)", "total.shape == exact.shape",
             "mutants"),
    mutation(f"{SURVEY}/examine.py::biases", "a bias that two modules share is counted twice",
             "first[id(aliases[bias])] == bias and ", "",
             "mutants",
             equivalent="parameters are asked for by the first of their names: what is described under another is not looked "
             "up, and was verified in the same way"),
    # ------------------------------------------------------------------------------------------------------------- examine
    mutation(f"{SURVEY}/examine.py::_check_neighbours",
             "examples may mix by a per cent", "if off > max(32 * eps, 10 * rounding):",
             "if off > max(1e-2, 10 * rounding):", "audit::models_that_mix_examples_are_refused", "audit"),
    mutation(f"{SURVEY}/examine.py::draws", "models that draw are said to mix, and those that mix to draw",
             "    if torch.equal(network.glance(x, record=False, seed=1).f, whole.f):",
             "    if not torch.equal(network.run(x, record=False, seed=1).f, whole.f):", "chunks::all_layers_are_of_one_draw"),
    mutation(f"{SURVEY}/examine.py::_one_by_one",
             "gradients of single examples need not add up", "if loose and not result.drawn:",
             "if False:", "mutants"),
    mutation(f"{SURVEY}/examine.py::_idle", "layers that are called and not used are called never called",
             "UNREACHED if reachable else UNCALLED", "UNCALLED if reachable else UNREACHED",
             "bad_input::a_layer_that_is_never_called"),
    mutation(f"{SURVEY}/examine.py::check_sums",
             "rounding of a weight without effect is mixing", "(a.norm() + exact[id(w)].norm()) + noise:",
             "(a.norm() + exact[id(w)].norm()):", "mutants", "uses"),
    # ------------------------------------------------------------------------------------------------------------- layouts
    mutation(f"{SURVEY}/survey.py::close", "rows are compared absolutely", "bool((x - y).abs().max() <= tol * x.abs().max()))",
             "bool((x - y).abs().max() <= tol))", "mutants"),
    mutation(f"{SURVEY}/survey.py::tolerance",
             "double precision is taken for single", "{torch.float64: 1e-9,", "{torch.float64: 1e-3,",
             "mutants"),
    mutation(f"{SURVEY}/survey.py::expanded", "an example axis is given though it changes the output",
             "if close(trial.f, whole.f, whole.state.precision):", "if True:", "mutants", MAPS),
    mutation(f"{SURVEY}/survey.py::_candidates", "the wrong examples are compared", "[:, 1:1 + m].reshape(y.shape)",
             "[:, :m].reshape(y.shape)", "mutants"),
    # ---------------------------------------------------------------------------------------------------------------- memo
    mutation(f"{SURVEY}/memo.py::SurveyMemo.recall",
             "a survey of other examples is taken for that of these", " or not _equal(entry.x, x):", ":",
             "mutants"),
    mutation(f"{SURVEY}/memo.py::SurveyMemo.recall",
             "matrices that are copies are not read anew", " and _follow(entry.survey, model):", ":",
             "uses"),
    mutation(f"{SURVEY}/memo.py::SurveyMemo.recall", "weights that were changed behind torch's back are not seen",
             "if _equal(entry.f, _first_outputs(model, x, state, output, entry.survey)):", "if True:", "audit", "renewal",
             "mutants"),
    mutation(f"{SURVEY}/memo.py::_architecture",
             "train or eval mode does not matter to a survey", "type(m), m.training,", "type(m),",
             "mutants", equivalent="all modules have one mode when surveyed, and kernels compare first outputs and calls"),
    mutation(f"{SURVEY}/memo.py::SurveyMemo.recall", "weights that lie elsewhere are read where they lay",
             "_places(entry.weights) == _places(_weights(model)) \\\n                and ", "", "mutants"),
    mutation(f"{SURVEY}/memo.py::SurveyMemo.recall", "what modules keep beside their weights does not matter to a survey",
             "entry.settings == settings(model) and ", "", "between"),
    mutation(f"{SURVEY}/memo.py::_weights",
             "a matrix that was transposed in place is read as it was", "(t.data_ptr(), t.stride())",
             "t.data_ptr()", "between"),
    mutation(f"{SURVEY}/memo.py::everything", "numbers that torch does not see change are not seen between kernels",
             "[fingerprint(t) for t in (*model.parameters(), *model.buffers())]", "[]", "remembered_surveys"),
    mutation(f"{SURVEY}/memo.py::everything", "attributes that change between kernels are not seen",
             "contents = [[(k, looker.look(kept, DEPTH)) for k, kept in holder.items()] for holder in holders]",
             "contents = []", "remembered_surveys"),
    mutation(f"{SURVEY}/memo.py::everything", "a hook that takes the place of another is not seen",
             "hooks = [[list(box) for box in _hooks(m)] for m in modules]", "hooks = []", "remembered_surveys"),
    mutation(f"{SURVEY}/memo.py::renewed", "maps that are refused with new weights are kept", "if verified.notes or not same",
             "if not same", "mutants"),
    mutation(f"{SURVEY}/memo.py::_own", "notes of a measurement are kept", "notes=dict(result.notes))", "notes=result.notes)",
             "costs::notes_are_not_kept_in_a_memo"),
    # -------------------------------------------------------------------------------------------------------------- splits
    mutation(f"{SURVEY}/survey.py::splits",
             "the first call speaks for all", " and all(_same(first, other) for other in others)}", "}",
             "splits"),
    mutation(f"{SURVEY}/survey.py::splits",
             "the product that follows at once is missed", "if p.after > i]", "if p.after > i + 1]",
             "splits"),
    mutation(f"{SURVEY}/survey.py::_disjoint",
             "outputs that no part has are lost", "v.int() == 1).all())", "v.int() <= 1).all())",
             "mutants"),
    mutation(f"{SURVEY}/survey.py::_parts", "queries that come last are called values", "return _disjoint(a, *pair) if",
             "return _disjoint(*pair, a) if", "splits"),
    # ------------------------------------------------------------------------------------------------------------ captures
    mutation("instrument/stream.py::Chunk.trimmed",
             "positions that speak up late are dropped", "if c.g.index_select(2, silent).any():",
             "if False:", "costs::positions_that_speak_up_late_are_heard"),
    mutation("instrument/stream.py::Chunk._one_by_one",
             "examples that are differentiated alone draw the same", "seed=self.rows.start + i)",
             "seed=self.rows.start)", "mutants"),
    mutation("instrument/stream.py::Chunk.run", "every chunk draws the same",
             "run = passed(network, self.x, self.rows.start, survey.silent)",
             "run = passed(network, self.x, 0, survey.silent)", "chunks"),
    mutation("instrument/stream.py::covariance", "the mean over chunks of positions, not the sum", "torch.bmm(g.mT, g).sum(0)",
             "torch.bmm(g.mT, g).mean(0)", "mutants"),
    mutation("instrument/stream.py::Chunk.run",
             "the calls of a chunk are not counted", "        check_calls(network, self.x, run.calls)\n",
             "", "mutants"),
    mutation("instrument/stream.py::room_for",
             "memory is laid out by the permutation, not by its inverse", "1 + order.index(i) for i",
             "1 + order[i] for i", "costs::room_is_taken_once", MAPS, "mutants"),
    mutation("instrument/stream.py::Chunk.trimmed",
             "of the positions that are kept, others are read", "(live, silent, c.h[:, live])",
             "(live, silent, c.h[:, :len(live)])", "costs::positions_without_an_output_are_dropped", "mutants"),
    mutation("instrument/stream.py::Chunk.reads_of", "of several calls only the first is compared",
             "if len(calls) > 1 or name in self._reads or", "if name in self._reads or",
             "mutants::kernel_examples_of_a_layer_that_is_called_twice"),
    # -------------------------------------------------------------------------------------------------------------- stream
    mutation("instrument/stream.py::steps", "the last chunk is as long as the others", "slice(i, min(i + size, n))",
             "slice(i, i + size)", "chunks"),
    mutation("instrument/stream.py::Share.has", "the ranks take the same chunks", "return chunk % self.ranks == self.rank",
             "return chunk % self.ranks == 0", "mutants", "extending", "laws"),
    mutation("instrument/stream.py::fitting",
             "models that draw are read many examples at a time", "return 1 if drawn else", "return",
             "chunks"),
    mutation("instrument/stream.py::pairs", "pairs above the diagonal are counted too", "if x2 is None and c.start > r.start:",
             "if False:", "laws::memory_changes_no_kernel", "mutants"),
    mutation("instrument/stream.py::ready", "products that leave single precision are made in it",
             "torch.float64 if wide or c.g.dtype", "torch.float64 if c.g.dtype", "range", "mutants"),
    mutation("instrument/stream.py::Chunk.graph", "outputs of every chunk are drawn alike",
             "self.network.run(self.x, record=False, seed=self.rows.start)",
             "self.network.run(self.x, record=False, seed=0)", "mutants"),
    # -------------------------------------------------------------------------------------------------------------- tokens
    mutation("instrument/tokens.py::Positions.real", "a pair is real if one of its tokens is", "some[..., None]).all(-1)",
             "some[..., None]).any(-1)", "tokens::a_pair_is_real_if_both_tokens_are"),
    mutation("instrument/tokens.py::Positions.real", "the first token is everywhere", "torch.where(tokens >= 0, mask",
             "torch.where(tokens > 0, mask", "masks", "tokens", "mutants"),
    mutation("instrument/tokens.py::_steps", "a loop that runs back runs onward", "device=reads[0].device).flip(0)\n",
             "device=reads[0].device)\n", "mutants"),
    mutation("instrument/tokens.py::Look._in_order",
             "tokens are counted from the end, and one too far", "self.T - 1 - mine", "self.T - mine",
             "tokens"),
    mutation("instrument/tokens.py::_steps", "steps that look alike are in order", "    if onward == back:\n", "    if False:\n",
             "mutants"),
    mutation("instrument/tokens.py::Look._by_content",
             "the token that is changed first is not among those that are seen", "tokens[:, 0] >= k)",
             "tokens[:, 0] > k)", "tokens::a_model_of_fixed_length_is_asked_by_contents"),
    # -------------------------------------------------------------------------------------------------------------- layers
    mutation("layers/__init__.py::view_of", "a subclass that computes something else is taken for its parent",
             "if type(module).forward is not kind.forward and not", "if False and not", "uses"),
    mutation("layers/attention.py::attention_in_parts",
             "values are read from the keys", "(query, key, value), weights", "(query, key, key), weights",
             MAPS),
    mutation("layers/attention.py::split",
             "queries, keys and values are the wrong thirds", '"qkv".index(which)', '"kqv".index(which)',
             MAPS),
    mutation("layers/attention.py::attention_in_parts",
             "the mask is forgotten", "attn_mask=attn_mask,", "attn_mask=None,", "mutants", MAPS),
    mutation("layers/bilinear.py::products", "the two inputs are swapped", "input1.unsqueeze(-1) * input2.unsqueeze(-2)",
             "input1.unsqueeze(-2) * input2.unsqueeze(-1)", "conformance::shipped_views_are_right", MAPS),
    mutation("layers/conv.py::convolution",
             "padding of an even kernel is on the wrong side", "(t // 2, t - t // 2)", "(t - t // 2, t // 2)",
             "mutants", MAPS),
    mutation("layers/conv.py::view", "every padding is one of zeros",
             ' if m.padding_mode == "zeros" else m.padding_mode', "",
             "conformance::shipped_views_are_right", MAPS),
    mutation("layers/conv.py::unfold", "dilation is forgotten", "slice(o * gap, o * gap +", "slice(o, o +",
             "conformance::shipped_views_are_right", MAPS),
    mutation("layers/conv.py::convolution",
             "padding of the axes is in the wrong order", "for pair in reversed(sides)", "for pair in sides",
             "mutants", MAPS),
    mutation("layers/conv_transpose.py::written", "padding of the axes is in the wrong order", "for p in reversed(padding)",
             "for p in padding", "conformance::shipped_views_are_right", "mutants"),
    mutation("layers/conv_transpose.py::view", "patches that no input writes are counted", "if any(more >= step for",
             "if any(more > step for", "mutants", "uses"),
    mutation("layers/embedding.py::indices", "the padding index has a gradient", "torch.where(x == padding, -1, x)", "x", MAPS),
    mutation("layers/embedding_bag.py::bag_in_parts", "an empty bag is divided by zero", ".clamp(min=1)", "", "mutants"),
    mutation("layers/embedding_bag.py::bag_in_parts",
             "weights of single entries are forgotten", 'if bag["per_sample_weights"] is not None:',
             "if False:", MAPS, "mutants"),
    mutation("layers/embedding_bag.py::bag_in_parts", "a padding index that is counted from the end is not one",
             "padding + len(weight) if padding is not None and padding < 0 else padding", "padding", "mutants", MAPS),
    mutation("layers/hf.py::PLAIN", "the weight is not transposed", "w.T,", "w,", MAPS),
    mutation("layers/linear.py::rows_of", "outputs of a part are all between its first and its last",
             "if last - first + 1 == len(rows) else rows", "if True else rows", "splits"),
    mutation("layers/linear.py::is_fused",
             "anything as wide as a multiple of three is fused", "d_out == 3 * d_in", "d_out % 3 == 0",
             "mutants", "splits"),
    mutation("layers/norm.py::batch_statistics", "a batch norm without running statistics has some",
             "use_batch = m.training or m.running_mean is None", "use_batch = m.training", "mutants",
             "bad_input::examples_that_are_mixed"),
    mutation("layers/norm.py", "the epsilon of a layer norm is torch's own", "F.layer_norm(x, m.normalized_shape, eps=m.eps)",
             "F.layer_norm(x, m.normalized_shape)", "mutants", KERNELS),
    mutation("layers/norm.py", "groups of a group norm are one", "F.group_norm(x, m.num_groups, eps=m.eps)",
             "F.group_norm(x, 1, eps=m.eps)", "conformance::shipped_views_are_right", KERNELS),
    mutation("layers/recurrent.py::gru", "the state of a GRU is mixed with the wrong sign", "n + z * (h - n)", "n + z * (h + n)",
             LAYERS),
    mutation("layers/recurrent.py::_layers_in_parts",
             "the last layer has dropout too", "and i + 1 < layers:", "and i < layers:", LAYERS),
    mutation("layers/recurrent.py::_Parts.along", "sequences that end are put back in the wrong order",
             "zip(state, *reversed(ended), strict=True)", "zip(state, *ended, strict=True)", LAYERS),
    mutation("layers/recurrent.py::weights_of", "a projection is looked for among the biases", "4 if biased else 2", "2", LAYERS),
    mutation("layers/recurrent.py::_Parts.along",
             "read backwards, a sequence begins from the first one's state", "s0[len(s):rows[t]]",
             "s0[:rows[t] - len(s)]", "mutants"),
]


# -------------------------------------------------------------------------------------------------------------- running them


def targets(tests: Sequence[str]) -> list[str]:
    """``audit::x`` -> ``tests/instrument/test_audit.py::test_x``; files that are not there are left out."""
    files = {path.stem.removeprefix("test_"): path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")}
    parts = [test.partition("::") for test in tests]
    return [f"{files[file]}{separator}{'test_' if name else ''}{name}" for file, separator, name in parts if file in files]


def run(mutation: Mutation, first: bool = False) -> Outcome:
    """Apply it to a copy of the source and run tests until one fails; ``first``: only those that are named with it."""
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source)
        (source / "richter" / mutation.file).write_text(mutation.applied(mutation.source.read_text()))
        others = [test for test in TESTS if test not in mutation.tests]
        caught = _failing(mutation.tests, source) or ("" if first else _failing(others, source))
    return Outcome(mutation, caught, time.perf_counter() - begun)


def _failing(tests: Sequence[str], source: Path) -> str:
    """The first test that fails with this source."""
    if not targets(tests):
        return ""
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", *targets(tests)]
    try:
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"no end within {SECONDS} seconds"
    lines = ended.stdout.splitlines()
    if ended.returncode not in (0, 1) and not any(line.startswith("ERROR") for line in lines):  # pytest itself
        raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")
    failures = [line.partition(" ")[2].partition(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))]
    return failures[0].removeprefix("tests/") if failures else ""


def chosen(pattern: str) -> list[Mutation]:
    return [m for m in MUTATIONS if pattern in m.name]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", metavar="PATTERN", help="of file or description")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--first", action="store_true", help="only the tests that are named with each")
    options = parser.parse_args()
    survived = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(lambda m: run(m, options.first), chosen(options.k)):
            m = outcome.mutation
            verdict = "caught  " if outcome.caught else "as said " if m.equivalent else "SURVIVED"
            survived += verdict == "SURVIVED"
            print(f"{verdict} {outcome.seconds:4.0f} s  {m.name}  {outcome.caught or m.equivalent}", flush=True)
    print(f"{survived} of {len(chosen(options.k))} survived")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
