"""One rank of the runs in test_megatron_schedules.py: real schedules of Megatron-core over gloo, under replay.

Each case builds the same model in another layout, trains one step on the same micro-batches, and says what it saw:

- the ids that the token dispatcher received, read there and compared with the samples' routes at the token that the trainer's
  own data pipeline put in that row. Nothing of r3 takes part in it: token numbers are pushed through Megatron's cuts;
- in a recompute, found again by the bytes of the hidden states that came in, the same, and that live rows chose as before;
- loss and gradients after DDP and `finalize_model_grads`, against a plain loop on one process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import megatron_models as models
import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron_cases import CASES, EVEN, EXCEPTIONS, MICRO_BATCHES, ON_FOUR, SPEC, TEN, Case

from r3 import Layout, RolloutSample
from r3.microbatch import MicroBatch
from r3.partial import PartialSample
from r3.trainers.megatron import MegatronReplay, attach, detach, layouts
from r3.trainers.megatron.cpu import without_gpu

# The trainer's own data pipeline ----------------------------------------------------------------------------------------


@dataclass
class Batch:
    """One micro-batch as this rank's forward step gets it, [b, s] or [1, t], after the context-parallel cut.

    identity: the row of the concatenated samples at each position, -1 for padding; labels and weights: the next token.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    identity: torch.Tensor
    position_ids: torch.Tensor
    packed: PackedSeqParams | None
    layout: Layout


def batch_of(samples: list[RolloutSample], case: Case) -> Batch:
    cp_rank = parallel_state.get_context_parallel_rank()
    lengths = [sample.num_tokens for sample in samples]
    multiple = 2 * case.cp * case.tp
    padded = [-(-n // multiple) * multiple for n in lengths]
    width = 16 if case.even else max(padded)
    lines: dict[str, list[torch.Tensor]] = {
        name: [] for name in ("tokens", "labels", "weights", "identity", "position_ids")
    }
    first = 0
    for sample, own in zip(samples, padded, strict=True):
        size, n = own if case.packed else width, sample.num_tokens
        tokens = torch.zeros(size, dtype=torch.int64)
        tokens[:n] = torch.from_numpy(sample.tokens.astype(np.int64))
        identity = torch.full((size,), -1)
        identity[:n] = torch.arange(first, first + n)
        weights = torch.zeros(size)
        weights[: n - 1] = 0.25 + (identity[: n - 1] % 7) / 7
        values = (tokens, tokens.roll(-1), weights, identity, torch.arange(size))
        for name, value in zip(lines, values, strict=True):
            lines[name].append(value)
        first += n
    whole = {name: torch.cat(v)[None] if case.packed else torch.stack(v) for name, v in lines.items()}
    if case.packed:
        bounds = np.concatenate([[0], np.cumsum(padded)]).astype(np.int32)
        local = {name: packed_cut(value, padded, case.cp, cp_rank) for name, value in whole.items()}
        described = layouts.thd(lengths, multiple=multiple)
        layout = layouts.context_parallel(
            described.layout, cp_rank, case.cp, cu_seqlens_padded=described.cu_seqlens_padded
        )
        cu = torch.from_numpy(bounds)
        params = PackedSeqParams("thd", cu, cu, cu, cu, max(padded), max(padded))
    else:
        local = get_batch_on_this_cp_rank(whole)
        layout = layouts.context_parallel(layouts.sbhd(lengths, width=width), cp_rank, case.cp)
        params = None
    return Batch(**local, packed=params, layout=layout)


def packed_cut(value: torch.Tensor, padded: list[int], size: int, rank: int) -> torch.Tensor:
    """Transformer Engine's cut of packed sequences, written out: quarters rank and 2 size - 1 - rank of each."""
    if size == 1:
        return value
    out = []
    for sequence in value[0].split(padded):
        quarters = sequence.chunk(2 * size)
        out += [quarters[rank], quarters[2 * size - 1 - rank]]
    return torch.cat(out)[None]


def router_identity(batch: Batch, case: Case) -> torch.Tensor:
    """Which token each row of a router holds: sequence first, then the tensor-parallel rank's part."""
    rows = batch.identity.transpose(0, 1)
    return rows.chunk(case.tp)[parallel_state.get_tensor_model_parallel_rank()].reshape(-1)


# What the dispatchers receive --------------------------------------------------------------------------------------------


class Observer:
    """Watches the routing maps that reach the dispatchers of a rank."""

    def __init__(self, chunks: list[Any], batches: list[list[RolloutSample]], case: Case) -> None:
        self.batches, self.case = batches, case
        self.current: int | None = None
        self.exact = self.wrong = self.changed = self.forwards = self.recomputes = 0
        self._maps: dict[tuple[int, bytes], tuple[int, torch.Tensor]] = {}
        self._identities: dict[int, np.ndarray[Any, Any]] = {}
        self._undo = []
        for chunk in chunks:
            for layer in chunk.decoder.layers:
                if hasattr(layer.mlp, "token_dispatcher"):
                    self._watch(layer.mlp.token_dispatcher, layer.layer_number - 1)

    def _watch(self, dispatcher: Any, layer: int) -> None:
        original = dispatcher.dispatch_preprocess

        def watching(hidden: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor) -> Any:
            key = (layer, hidden.detach().clone().numpy().tobytes())
            recompute = torch._C._current_graph_task_id() != -1
            if recompute:
                number, before = self._maps[key]
                self.changed += int((before != routing_map).any(1).sum())
                self.recomputes += 1
            else:
                assert self.current is not None
                number = self.current
                self._maps[key] = (number, routing_map.clone())
                self.forwards += 1
            self._compare(layer, number, routing_map)
            return original(hidden, routing_map, probs)

        dispatcher.dispatch_preprocess = watching
        self._undo.append(lambda: dispatcher.__dict__.pop("dispatch_preprocess"))

    def _compare(self, layer: int, number: int, routing_map: torch.Tensor) -> None:
        samples = self.batches[number]
        if number not in self._identities:
            self._identities[number] = router_identity(batch_of(samples, self.case), self.case).numpy()
        identity = self._identities[number]
        position = SPEC.moe_layers.index(layer)
        ids = np.concatenate([s.routes.ids[position] for s in samples])
        recorded = np.concatenate([s.routes.recorded for s in samples])
        assert len(identity) == len(routing_map)
        rows = np.flatnonzero((identity >= 0) & recorded[identity])
        chosen = routing_map.numpy()[rows]
        wanted = np.zeros_like(chosen)
        np.put_along_axis(wanted, ids[identity[rows]].astype(np.int64), True, axis=1)
        right = (chosen == wanted).all(axis=1)
        self.exact += int(right.sum())
        self.wrong += int((~right).sum())

    def remove(self) -> None:
        for undo in self._undo:
            undo()


# One step ------------------------------------------------------------------------------------------------------------------


_groups: list[tuple[int | None, ...]] = []


def use_groups(case: Case) -> None:
    """Megatron's process groups of a layout. Making them takes seconds, so cases of one layout share them."""
    layout = (case.tp, case.pp, case.vpp, case.cp, case.ep, case.etp)
    if [layout] != _groups:
        if _groups:
            parallel_state.destroy_model_parallel()
        _groups[:] = [layout]
        parallel_state.initialize_model_parallel(
            case.tp,
            case.pp,
            case.vpp,
            context_parallel_size=case.cp,
            expert_model_parallel_size=case.ep,
            expert_tensor_parallel_size=case.etp,
        )
    model_parallel_cuda_manual_seed(1)


class Rank:
    """The model chunks of a case on this rank, in DDP, with a replay attached."""

    def __init__(self, case: Case) -> None:
        self.case = case
        use_groups(case)
        self.config = models.config(
            tensor_model_parallel_size=case.tp,
            pipeline_model_parallel_size=case.pp,
            virtual_pipeline_model_parallel_size=case.vpp,
            expert_model_parallel_size=case.ep,
            expert_tensor_parallel_size=case.etp,
            context_parallel_size=case.cp,
            sequence_parallel=case.tp > 1,
            variable_seq_lengths=case.pp > 1 and not case.even,
            finalize_model_grads_func=finalize_model_grads,
            **case.settings,
        )
        self.bare = [models.build(self.config, stage) for stage in (range(case.vpp) if case.vpp else [None])]
        ddp = DistributedDataParallelConfig(bucket_size=None)
        self.chunks = [DistributedDataParallel(self.config, ddp, model) for model in self.bare]
        self.replay: MegatronReplay = attach(self.chunks, min_agreement=0)

    def close(self) -> None:
        detach(self.chunks)

    def share(self, batches: list[list[RolloutSample]]) -> list[list[RolloutSample]]:
        """This data-parallel rank's micro-batches."""
        rank = parallel_state.get_data_parallel_rank()
        each = len(batches) // self.case.dp(dist.get_world_size())
        return batches[rank * each : (rank + 1) * each]

    def step(
        self, batches: list[list[RolloutSample]], *, fail_at: int | None = None, forward_only: bool = False
    ) -> Any:
        """One step of the schedule on this rank's micro-batches. Returns (observer, loss over all ranks)."""
        observer = Observer(self.bare, batches, self.case)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        calls = 0

        def forward_step(iterator: Any, chunk: Any) -> Any:
            nonlocal calls
            number = observer.current = next(iterator)
            calls += 1
            batch = batch_of(batches[number], self.case)
            samples = batches[number]
            if not self.case.whole:
                samples = [PartialSample.of(s, self.replay.layers_of(chunk)) for s in samples]
            handle = chunk.module.decoder.layers[-1].register_forward_hook(fail) if calls == fail_at else None
            tokens = batch.tokens if chunk.module.pre_process else None
            try:
                with self.replay.micro_batch(chunk, samples, batch.layout, tokens):
                    losses = chunk(
                        batch.tokens, batch.position_ids, None, labels=batch.labels, packed_seq_params=batch.packed
                    )
            finally:
                if handle is not None:
                    handle.remove()

            def loss_func(losses: torch.Tensor) -> Any:
                loss = (losses.float() * batch.weights).sum()
                return loss, {"loss": loss.detach().clone()}

            return losses, loss_func

        iterators = [iter(range(len(batches))) for _ in self.chunks]
        try:
            results = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if self.case.vpp else iterators[0],
                model=self.chunks if self.case.vpp else self.chunks[0],
                num_microbatches=len(batches),
                seq_length=16,
                micro_batch_size=2,
                forward_only=forward_only,
            )
        finally:
            observer.remove()
        loss = sum((float(result["loss"]) for result in results), 0.0)
        total = torch.tensor(loss, dtype=torch.float64)
        dist.all_reduce(total)
        return observer, float(total) / self.case.tp

    def errors(self, expected: dict[str, torch.Tensor], num_micro_batches: int) -> tuple[float, float, list[str]]:
        """(largest error relative to the parameter's largest gradient, smallest norm of a router's gradient, names)."""
        worst, least, names = 0.0, float("inf"), []
        for model in self.bare:
            for name, parameter, cut in models.global_parameters(model):
                got, want = (
                    parameter.main_grad * (num_micro_batches * self.case.dp(dist.get_world_size())),
                    cut(expected[name]),
                )
                scale = float(expected[name].abs().max())
                worst = max(worst, float((got - want).abs().max()) / scale)
                names.append(name)
                if "router" in name:
                    least = min(least, float(got.norm()))
        return worst, least, names


def norms_without_transformer_engine() -> None:
    """Recomputing norms asks Transformer Engine whether FP8 is on; 0.16.1 does so without it as well."""
    off = {"is_fp8_enabled": lambda: False, "get_fp8_recipe": lambda: None}
    megatron_random.FP8GlobalStateManager = SimpleNamespace(**off)
    megatron_random.activation_recompute_forward = lambda **_: contextlib.nullcontext()
    megatron_random.fp8_autocast = lambda **_: contextlib.nullcontext()


def fail(*_: Any) -> None:
    raise ZeroDivisionError("in the middle of a forward")


def alive() -> int:
    gc.collect()
    return sum(isinstance(thing, MicroBatch) for thing in gc.get_objects())


def reference(batches: list[list[RolloutSample]]) -> tuple[float, dict[str, torch.Tensor]]:
    """A plain loop on one process: no schedule, no DDP, no recompute."""
    use_groups(Case("reference"))
    model = models.build(models.config())
    replay = attach(model, min_agreement=0)
    total = 0.0
    for samples in batches:
        batch = batch_of(samples, Case("reference"))
        with replay.micro_batch(model, samples, batch.layout, batch.tokens):
            losses = model(batch.tokens, batch.position_ids, None, labels=batch.labels)
        loss = (losses * batch.weights).sum()
        loss.backward()
        total += float(loss)
    gradients = {name: p.grad.clone() for name, p, _ in models.global_parameters(model)}
    return total, gradients


def run_case(case: Case, expected: tuple[float, dict[str, torch.Tensor]]) -> dict[str, Any]:
    rank = Rank(case)
    batches = rank.share(EVEN if case.even else MICRO_BATCHES)
    observer, loss = rank.step(batches)
    worst, least, names = rank.errors(expected[1], len(batches))
    routers = len(rank.replay.layers)
    result = {
        "loss": (loss, expected[0]),
        "error": worst,
        "router gradient": least,
        "parameters": names,
        "exact": observer.exact,
        "wrong": observer.wrong,
        "changed": observer.changed,
        "forwards": (observer.forwards, routers * len(batches)),
        "recomputes": (observer.recomputes, len(set(case.recomputed) & set(rank.replay.layers)) * len(batches)),
        "layers": rank.replay.layers,
        "coverage": rank.replay.coverage.to_dict(),
        "alive": alive(),
    }
    before = dataclasses.replace(rank.replay.coverage)
    observer, loss = rank.step(batches, forward_only=True)
    result["forward only"] = (loss, observer.wrong, rank.replay.coverage.forwards - before.forwards, alive())
    rank.close()
    result["left behind"] = [
        layer.mlp.router.router_replay
        for model in rank.bare
        for layer in model.decoder.layers
        if hasattr(layer.mlp, "router") and layer.mlp.router.router_replay is not None
    ]
    return result


def run_exception(case: Case, expected: tuple[float, dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Ten micro-batches, an exception in the fourth; then a whole step.

    In a pipeline of two the last stage raises in its third: the first stage is then in its fourth, and nobody waits.
    """
    rank = Rank(case)
    with pytest.raises(ZeroDivisionError):
        rank.step(TEN, fail_at=3 if case.pp > 1 and parallel_state.is_pipeline_last_stage() else 4)
    left = alive()
    observer, loss = rank.step(TEN)
    worst, least, _ = rank.errors(expected[1], len(TEN))
    result = {
        "alive": left,
        "loss": (loss, expected[0]),
        "error": worst,
        "router gradient": least,
        "wrong": observer.wrong,
        "changed": observer.changed,
        "exact": observer.exact,
    }
    rank.close()
    return result


def main(rank: int, size: int, port: int, out: str, names: list[str]) -> None:
    """Run cases on one of `size` ranks and leave what they saw in `out`."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    without_gpu()
    norms_without_transformer_engine()
    cases = {case.name: case for case in [*CASES, *ON_FOUR, *EXCEPTIONS]}
    expected, of_even, of_ten = reference(MICRO_BATCHES), reference(EVEN), reference(TEN)
    for name in names:
        case = cases[name]
        if name.startswith("exception"):
            result = run_exception(case, of_ten)
        else:
            result = run_case(case, of_even if case.even else expected)
        torch.save(result, f"{out}/{name}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
