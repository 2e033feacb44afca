"""What both public schedules do: torch's interface on the outside, one program and its executor inside."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from slimpipe.options import SlimPipeOptions
from slimpipe.planner.timeline import Timeline
from slimpipe.program import Program, build_program
from slimpipe.runtime.agreement import StepShape, agree
from slimpipe.runtime.batch import Batch
from slimpipe.runtime.executor import Executor
from slimpipe.runtime.executors import ExchangeRefusedError, Executors
from slimpipe.runtime.meter import MemoryMeter
from slimpipe.runtime.microbatches import Microbatches, check_pre_split, split_batch
from slimpipe.runtime.record import StepRecord
from slimpipe.runtime.recording import gather_timeline
from slimpipe.runtime.refusals import check_backend, refuse_tied_weights
from slimpipe.runtime.stage import Stage
from slimpipe.runtime.vocabulary_checks import check_vocabulary, loss_kwargs_hash, vocab_parallel, vocabulary_hash
from slimpipe.vocabulary import VocabularyEmbedding, VocabularyHead


class SlimPipeSchedule:
    """What both schedules share: they differ in the number of stages per rank only."""

    _n_microbatches: int
    _has_backward: bool
    _loss_fn: Callable | None
    _split_inputs: Callable
    _merge_outputs: Callable

    def _set_up(
        self,
        stages: list[PipelineStage],
        n_microbatches: int,
        num_slices: int,
        options: SlimPipeOptions | None,
        loss_fn: Callable | None,
        embedding: VocabularyEmbedding | None,
    ) -> None:
        """Everything that needs no communication; raises on every rank alike."""
        options = SlimPipeOptions() if options is None else options
        if not isinstance(options, SlimPipeOptions):
            raise TypeError(f"options = {options!r} is a {type(options).__name__}; it must be a SlimPipeOptions")
        first = stages[0]
        if first.num_stages != len(stages) * first.group_size:
            raise ValueError(
                f"rank {first.group_rank} was given {len(stages)} of {first.num_stages} stages; a pipeline of "
                f"{first.group_size} ranks needs {first.num_stages / first.group_size:g} stages on every rank"
            )
        self.options = options
        self.num_slices = num_slices
        self._torch_stages = stages
        self._n_microbatches = n_microbatches
        self._embedding = embedding
        self._build = functools.partial(
            build_program,
            first.group_size,
            num_slices,
            len(stages),
            n_microbatches,
            vocab_parallel=vocab_parallel(loss_fn, embedding),
        )
        self._plain_program: Program = self._build()
        self.program = self._plain_program
        """Of the last training step; before the first, without exchange."""
        wanted = [first.group_rank + j * first.group_size for j in range(len(stages))]
        given = [getattr(stage, "stage_index", index) for stage, index in zip(stages, wanted, strict=True)]
        if given != wanted:
            raise ValueError(
                f"rank {first.group_rank} was given stages {given}; it must hold stages {wanted}, in this order"
            )
        self._stages_by_index: dict[int, Stage] = {}
        self._executors: Executors | None = None
        self._meter: MemoryMeter | None = None
        self._record = StepRecord()
        self._num_failures = 0

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: list[tuple] | None = None,
        kwarg_mbs: list[dict] | None = None,
        target_mbs: list | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one training step.

        Args:
            *args: Whole-batch arguments of the first stage; dim 0 is cut into microbatches.
            target: Whole-batch labels, on the rank of the last stage.
            losses: Filled with one detached loss per microbatch (the sum over its slices) on the rank of the last
                stage.
            return_outputs: Whether to return the last stage's outputs: logits, or hidden states where the output layer
                is shared. They live until the caller drops them: pass False where memory counts.
            loss_kwargs: Further keyword arguments of ``loss_fn``, on the rank of the last stage; where the output layer
                is shared, the same ones on every rank.
            arg_mbs: Instead of ``args``: one tuple per microbatch.
            kwarg_mbs: Instead of ``kwargs``: one dict per microbatch.
            target_mbs: Instead of ``target``: one tensor per microbatch.
            **kwargs: Whole-batch keyword arguments for every stage. ``positions`` must be given on every rank or on
                none.

        Returns:
            The merged outputs on the rank of the last stage if ``return_outputs``, else None.

        Collectives: one small all-gather on the stages' group, then the program's messages on groups of their own. On a
        GPU the host waits for that all-gather (and reads positions, if there are any), and from the first instruction
        to the last for nothing, save in the first step of a batch shape and in the model itself (as torchtitan's expert
        parallelism does).

        Raises:
            ValueError: The arguments cannot be run in slices; raised on every rank before any activation is sent.
            PipelineError: Another rank failed, died or hangs.
        """
        error, batch, kwargs_hash = None, None, 0
        try:
            if self._has_backward and not torch.is_grad_enabled():
                raise RuntimeError("step() needs gradients and was called under torch.no_grad(); call eval() instead")
            microbatches = self._microbatches(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
            batch = Batch(microbatches, num_slices=self.num_slices, options=self.options)
            self._check_roles(microbatches, batch, losses)
            self._look_at_stages()
            kwargs_hash = loss_kwargs_hash(self._loss_fn, loss_kwargs)
        except Exception as raised:  # whatever it is, the other ranks must not wait for this one
            error = raised
        shape = self._agree(batch, error, kwargs_hash)
        assert batch is not None
        batch.set_seq_len(shape.seq_len)
        try:
            executor = self._executor(shape)
            with torch.set_grad_enabled(self._has_backward):
                step_losses, outputs = executor.run(
                    batch, loss_kwargs=loss_kwargs, keep_outputs=return_outputs and self._holds_last
                )
        except ExchangeRefusedError:
            raise
        except BaseException:
            # Messages of this step may still be on their way; the next step gets channels that know nothing of it. The
            # old groups stay: destroying one can wait for a peer that hangs.
            self._executors = None
            self._num_failures += 1
            raise
        assert self._executors is not None
        self._executors.done(shape, executor)
        if self._has_backward:
            self._record, self.program = executor.record, executor.program
        if losses is not None and self._holds_last:
            losses[:] = step_losses
        if not (return_outputs and self._holds_last):
            return None
        return self._merge_outputs([torch.cat(slices, dim=self.options.seq_dim) for slices in outputs])

    def eval(self, *args: Any, **kwargs: Any) -> Any:
        """Run one forward-only step: arguments, losses and outputs as in `step`, no gradients."""
        has_backward, self._has_backward = self._has_backward, False
        try:
            return self.step(*args, **kwargs)
        finally:
            self._has_backward = has_backward

    def metrics(self) -> dict[str, float]:
        """What the last training step measured on this rank.

        Returns:
            ``num_slices``; ``peak_live_units``; of the context exchange ``exchange_bytes`` (sent by this rank),
            ``exchange_wait_seconds`` (spent waiting for its messages) and ``attention_load_max_over_mean`` (see
            `Program.load_max_over_mean`; 1 is perfect); ``vocabulary_wait_seconds`` (the host's, in the collectives of
            a shared vocabulary). Where ``SlimPipeOptions.measure_memory`` is on ``peak_live_bytes`` (held for backward:
            saved by autograd, K,V, inputs, rows held for others, gradients of hidden states), ``kv_bytes``,
            ``carry_bytes`` (dK,dV in waiting), ``exchange_held_bytes`` (K,V and dK,dV held for others)
            and ``message_bytes`` (of the pipeline, not of the exchange) at their peaks.
        """
        record = self._record
        metrics: dict[str, float] = {
            "num_slices": self.num_slices,
            "peak_live_units": record.peak_live_units,
            "exchange_bytes": record.exchange_bytes,
            "exchange_wait_seconds": record.exchange_wait_seconds,
            "vocabulary_wait_seconds": record.vocabulary_wait_seconds,
            "attention_load_max_over_mean": self.program.load_max_over_mean,
        }
        if self._meter is not None:
            metrics |= {
                "peak_live_bytes": self._meter.peak_bytes,
                "kv_bytes": record.peak_kv_bytes,
                "carry_bytes": record.peak_carry_bytes,
                "exchange_held_bytes": record.peak_held_bytes,
                "message_bytes": record.peak_message_bytes,
            }
        return metrics

    @property
    def record(self) -> StepRecord:
        """Everything the last step measured, instruction times included where the options ask for them."""
        return self._record

    def timeline(self) -> Timeline:
        """The last training step as all ranks recorded it; `SlimPipeOptions.record_times` must be on.

        Collective over the pipeline's ranks; every rank gets the same. `slimpipe show --run` reads what its ``to_json``
        gives.

        Raises:
            ValueError: Nothing was recorded.
        """
        if self.options.record_times and not self._record.times:
            raise ValueError("no training step was recorded yet: call step() first")
        return gather_timeline(
            self._record,
            self.program,
            rank=self._torch_stages[0].group_rank,
            group=self._group,
            device=torch.device(self._torch_stages[0].device),
            title=type(self).__name__.removeprefix("Schedule"),
        )

    def close(self) -> None:
        """Destroy the process groups that the schedule created. Collective over the pipeline's ranks."""
        if self._executors is not None:
            self._executors.close()
            self._executors = None

    # Parts -----------------------------------------------------------------------------------------------------------

    @property
    def _group(self) -> dist.ProcessGroup | None:
        """The pipeline's process group; None where one rank holds every stage."""
        first = self._torch_stages[0]
        return None if first.group_size == 1 else first.group or dist.group.WORLD

    @property
    def _head(self) -> VocabularyHead | None:
        """This rank's part of a shared output layer."""
        return self._loss_fn if isinstance(self._loss_fn, VocabularyHead) else None

    @property
    def _holds_last(self) -> bool:
        return any(stage.is_last for stage in self._torch_stages)

    def _microbatches(self, args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs) -> Microbatches:
        count = self._n_microbatches
        if arg_mbs is None and kwarg_mbs is None and target_mbs is None:
            if self.options.seq_dim == 0 and count > 1:
                raise ValueError(
                    f"SlimPipeOptions.seq_dim = 0 and n_microbatches = {count}: dim 0 of a whole batch would have to "
                    "be cut into both slices and microbatches; pass arg_mbs, kwarg_mbs and target_mbs, or "
                    "n_microbatches = 1"
                )
            return split_batch(count, args, kwargs, target, split=self._split_inputs)
        whole = {"args": args, "kwargs": kwargs, "target": target}
        return check_pre_split(count, whole, arg_mbs=arg_mbs, kwarg_mbs=kwarg_mbs, target_mbs=target_mbs)

    def _check_roles(self, microbatches: Microbatches, batch: Batch, losses: list | None) -> None:
        if losses is not None and not isinstance(losses, list):
            raise TypeError(f"losses is a {type(losses).__name__}; it must be a list, which the step fills")
        if any(stage.is_first for stage in self._torch_stages) and not all(microbatches.args):
            raise ValueError("the rank of the first stage got no tokens: pass them as argument or in arg_mbs")
        if self._embedding is not None:
            batch.check_ids()
        if self._head is not None:
            batch.check_labels()
        if self._holds_last and self._loss_fn is not None and microbatches.targets is None:
            raise ValueError("the rank of the last stage got no labels: pass target or target_mbs")

    def _agree(self, batch: Batch | None, error: Exception | None, kwargs_hash: int) -> StepShape:
        first = self._torch_stages[0]
        mine = StepShape(
            failed=int(error is not None),
            seq_len=-1 if batch is None or batch.seq_len is None else batch.seq_len,
            num_tokens=-1 if batch is None or batch.seq_len is None else batch.num_tokens,
            has_positions=-1 if batch is None else int(batch.has_positions),
            documents=-1 if batch is None or batch.seq_len is None else batch.documents_hash,
            has_backward=int(self._has_backward),
            num_slices=self.num_slices,
            num_stages_per_rank=self.program.num_stages_per_rank,
            num_microbatches=self._n_microbatches,
            seq_dim=self.options.seq_dim,
            exchange=self.options.exchange_hash,
            record_times=int(self.options.record_times),
            vocabulary=vocabulary_hash(self._loss_fn, self._embedding),
            loss_kwargs=kwargs_hash,
            num_failures=self._num_failures,
        )
        return agree(mine, error, group=self._group, device=first.device)

    def _look_at_stages(self) -> None:
        """Examine the modules at the first step: users may still replace `stage.submod` after making the schedule."""
        if self._stages_by_index:
            return
        if self._group is not None:
            check_backend(torch.device(self._torch_stages[0].device))
        stages = {
            stage.stage_index: Stage(
                stage.submod,
                stage.stage_index,
                is_first=stage.is_first,
                is_last=stage.is_last,
                loss_fn=None if self._head is not None else self._loss_fn,
                kernel=self.options.kernel,
                device=torch.device(stage.device),
            )
            for stage in self._torch_stages
        }
        refuse_tied_weights({index: stage.submod for index, stage in stages.items()})
        check_vocabulary(self._head, self._embedding, group=self._group)
        if self.options.measure_memory:
            self._meter = MemoryMeter(
                [stage.submod for stage in stages.values()],
                others=lambda: 0 if self._executors is None else self._executors.num_bytes,
            )
        self._stages_by_index = stages

    def _executor(self, shape: StepShape) -> Executor:
        first = self._torch_stages[0]
        if self._executors is None:
            self._executors = Executors(
                self._plain_program,
                build=self._build,
                rank=first.group_rank,
                stages=self._stages_by_index,
                group=self._group,
                device=torch.device(first.device),
                options=self.options,
                meter=self._meter,
                head=self._head,
                embedding=self._embedding,
            )
        if self._meter is not None and self._has_backward:
            self._meter.reset_peak()
        return self._executors.choose(shape)
