"""Runs one rank's part of a program: a loop over instructions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from slimpipe.attention.events import Alone, Learner, Phase, Sharing
from slimpipe.attention.helper import Exchange
from slimpipe.attention.kv_store import SlotBuffers
from slimpipe.options import SlimPipeOptions
from slimpipe.program import Channel, Instruction, Op, Program, SlotPlan, Unit, plan_slots
from slimpipe.runtime.batch import Batch
from slimpipe.runtime.clock import clock_of
from slimpipe.runtime.meter import MemoryMeter
from slimpipe.runtime.record import Recorder, StepRecord
from slimpipe.runtime.stage import Stage
from slimpipe.runtime.vocabulary import SharedVocabulary
from slimpipe.transport import Receive, TensorMeta, Transport, lost_rank


class _Step:
    """What one step holds while it runs."""

    def __init__(
        self, batch: Batch, num_microbatches: int, *, loss_kwargs: dict[str, Any] | None, keep_outputs: bool
    ) -> None:
        self.batch, self.loss_kwargs, self.keep_outputs = batch, loss_kwargs, keep_outputs
        self.losses: list[torch.Tensor | None] = [None] * num_microbatches
        self.outputs: list[list[torch.Tensor]] = [[] for _ in range(num_microbatches)]
        self.received: dict[tuple[Op, Unit], tuple[Channel, Receive]] = {}
        self.made: dict[tuple[Op, Unit], torch.Tensor] = {}
        """By send instruction: tensors that wait for it, or for the neighbouring stage on this very rank."""
        self.metas: dict[int, TensorMeta] = {}
        """Shape and dtype of each stage's output, hence of the gradient that comes back."""
        self.recorder: Recorder | None = None
        self.num_bytes = 0
        """Of the message of the instruction that runs."""

    def add_loss(self, unit: Unit, loss: torch.Tensor) -> None:
        """Add the loss of a slice to that of its microbatch."""
        before = self.losses[unit.microbatch]
        self.losses[unit.microbatch] = loss if before is None else before + loss


class Executor:
    """Runs the instructions of one rank.

    Args:
        program: The program; its ranks, slices and microbatches must be those of the batches given to `run`.
        rank: Pipeline rank.
        stages: This rank's stages by global index.
        device: Where the stages run.
        transport: The rank's channels; None when one rank holds every stage.
        options: Options of the schedule.
        meter: Where saved bytes are counted; None to count nothing.
        exchange: This rank's part in the program's transfers; None if it has none.
        vocabulary: This rank's part in the work on the vocabulary; None if the program shares none.
    """

    def __init__(
        self,
        program: Program,
        *,
        rank: int,
        stages: dict[int, Stage],
        device: torch.device,
        transport: Transport | None,
        options: SlimPipeOptions,
        meter: MemoryMeter | None,
        exchange: Exchange | None = None,
        vocabulary: SharedVocabulary | None = None,
    ) -> None:
        assert exchange is not None or not program.transfers, "the program has transfers and nothing to run them"
        assert (vocabulary is not None) == (program.vocab_parallel != "none"), "the vocabulary is shared half-way"
        self._exchange, self._vocabulary = exchange, vocabulary
        self.learners: dict[int, Learner] | None = None
        """By stage, what learns the attention events of the next step for later exchange; None to learn nothing."""
        self.program, self._rank, self._stages = program, rank, stages
        self._plans = _plan_together(program, stages)
        self._buffers: dict[int, list[SlotBuffers]] = {}
        """By number of attention layers, see `_plan_together`."""
        self._device, self._transport, self._options, self._meter = device, transport, options, meter
        self._handlers: dict[Op, Callable[[_Step, Instruction], None]] = {
            Op.RECEIVE_FORWARD: self._receive_forward,
            Op.FORWARD: self._forward,
            Op.SEND_FORWARD: self._send_forward,
            Op.RECEIVE_BACKWARD: self._receive_backward,
            Op.BACKWARD: self._backward,
            Op.SEND_BACKWARD: self._send_backward,
            Op.HELP_FORWARD: self._help,
            Op.HELP_BACKWARD: self._help,
            Op.EMBED: self._embed,
            Op.VOCABULARY: self._share_loss,
            Op.EMBED_BACKWARD: self._embed_backward,
        }
        instructions = program.instructions[rank]
        self._last_backward = {i.unit.stage: i.unit for i in instructions if i.op is Op.BACKWARD}

    def run(
        self, batch: Batch, *, loss_kwargs: dict[str, Any] | None, keep_outputs: bool
    ) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
        """Run one step.

        Returns:
            Detached loss per microbatch (empty off the last stage, unless the vocabulary is shared, and without a loss
            function), and the last stage's outputs per microbatch and slice (empty unless ``keep_outputs``).

        Raises:
            PipelineError: A message failed; names the rank, the instruction and its stage.
        """
        step = _Step(batch, self.program.num_microbatches, loss_kwargs=loss_kwargs, keep_outputs=keep_outputs)
        self.record = StepRecord()
        if self._exchange is not None:
            self._exchange.begin(batch.documents)
        if self._meter is not None:
            self._meter.exclude(batch.tensors())
        for index, stage in self._stages.items():
            plan = self._plans[index]
            buffers = self._buffers.setdefault(len(stage.attention), [SlotBuffers(plan) for _ in stage.attention])
            stage.begin(plan, buffers, keep_output=self._options.keep_attention_output, meter=self._meter)
        instruction: Instruction | None = None
        waited_before = 0.0 if self._vocabulary is None else self._vocabulary.waited
        try:
            if self._vocabulary is not None:
                self._vocabulary.begin(self.program, batch, loss_kwargs=loss_kwargs)
            if self._options.record_times:
                step.recorder = Recorder(clock_of(self._device))
            run = self._run_and_record if step.recorder else self._run
            for instruction in self.program.instructions[self._rank]:
                run(step, instruction)
            instruction = None
            if self._transport is not None:
                self._transport.finish()
            if self._exchange is not None:
                self._exchange.finish()
                self.record.exchange_bytes = self._exchange.sent_bytes
                self.record.exchange_wait_seconds = self._exchange.waited
            if self._vocabulary is not None:
                self._vocabulary.end()
                self.record.vocabulary_wait_seconds = self._vocabulary.waited - waited_before
        except BaseException as error:
            where = "the start or end of its step" if instruction is None else instruction
            error.add_note(f"slimpipe: pipeline rank {self._rank} was at: {where}")
            self._drop()
            raise
        assert not step.received and not step.made, "messages were left over after the step"
        for stage in self._stages.values():
            stage.end()
        self._buffers.clear()
        if step.recorder is not None:
            self.record.times = step.recorder.times()
        return [loss for loss in step.losses if loss is not None], step.outputs

    @property
    def kv_bytes(self) -> int:
        """Bytes of the K,V buffers now."""
        return sum(buffers.num_bytes for layers in self._buffers.values() for buffers in layers)

    @property
    def held_bytes(self) -> int:
        """Bytes held for other ranks now."""
        return 0 if self._exchange is None else self._exchange.held_bytes

    @property
    def _waited_with_all(self) -> float:
        """Seconds of the host so far in the exchange and in the vocabulary's collectives."""
        return sum(part.waited for part in (self._exchange, self._vocabulary) if part is not None)

    def _run(self, step: _Step, instruction: Instruction) -> None:
        self._handlers[instruction.op](step, instruction)

    def _run_and_record(self, step: _Step, instruction: Instruction) -> None:
        assert step.recorder is not None
        waited_before, step.num_bytes = self._waited_with_all, 0
        with step.recorder.instruction(instruction) as marks:
            self._run(step, instruction)
        marks.waited, marks.num_bytes = self._waited_with_all - waited_before, step.num_bytes

    # Instructions ----------------------------------------------------------------------------------------------------

    def _forward(self, step: _Step, instruction: Instruction) -> None:
        unit = instruction.unit
        stage = self._stages[unit.stage]
        sharing = self._sharing(instruction)
        received = self._embedded() if stage.is_first else self._take(step, Op.RECEIVE_FORWARD, instruction)
        output, loss = stage.forward(
            unit,
            step.batch,
            received,
            loss_kwargs=step.loss_kwargs,
            with_backward=not self.program.forward_only,
            sharing=sharing,
        )
        sharing.finish()
        if loss is not None:
            step.add_loss(unit, loss)
        if stage.is_last and self._vocabulary is not None:
            self._vocabulary.put_hidden(output)
        if not stage.is_last:
            step.metas[unit.stage] = TensorMeta.of(output)
            step.made[Op.SEND_FORWARD, unit] = output
        elif step.keep_outputs:
            step.outputs[unit.microbatch].append(output)
        self._measure()

    def _backward(self, step: _Step, instruction: Instruction) -> None:
        unit = instruction.unit
        stage = self._stages[unit.stage]
        gradient = self._gradient_of_loss(unit) if stage.is_last else self._take(step, Op.RECEIVE_BACKWARD, instruction)
        if unit == self._last_backward[unit.stage]:
            stage.sync_gradients()
        sharing = self._sharing(instruction)
        gradient = stage.backward(unit, gradient, sharing=sharing)
        sharing.finish()
        if gradient is not None:
            step.made[Op.EMBED_BACKWARD if stage.is_first else Op.SEND_BACKWARD, unit] = gradient
        self._measure()

    def _share_loss(self, step: _Step, instruction: Instruction) -> None:
        assert self._vocabulary is not None
        step.add_loss(instruction.unit, self._vocabulary.loss(instruction.unit))
        self._measure()

    def _embed(self, step: _Step, instruction: Instruction) -> None:
        assert self._vocabulary is not None
        self._vocabulary.embed(instruction.unit)

    def _embed_backward(self, step: _Step, instruction: Instruction) -> None:
        assert self._vocabulary is not None
        gradient = step.made.pop((instruction.op, instruction.unit), None)
        self._vocabulary.embed_backward(instruction.unit, gradient)

    def _embedded(self) -> torch.Tensor | None:
        """What enters the first stage, if not the tokens."""
        if self.program.vocab_parallel != "both":
            return None
        assert self._vocabulary is not None
        return self._vocabulary.take_embedded()

    def _gradient_of_loss(self, unit: Unit) -> torch.Tensor | None:
        """Gradient of the last stage's output, if the unit does not end in its own loss."""
        return None if self._vocabulary is None else self._vocabulary.take_gradient(unit)

    def _help(self, step: _Step, instruction: Instruction) -> None:
        sharing = self._sharing(instruction)
        sharing.start(())
        sharing.finish()
        self._measure()

    def _sharing(self, instruction: Instruction) -> Sharing:
        """What this rank does with others while it runs a compute instruction."""
        if self.learners is not None:
            phase = Phase.FORWARD if instruction.op is Op.FORWARD else Phase.BACKWARD
            return self.learners[instruction.unit.stage].phase(phase)
        return Alone() if self._exchange is None else self._exchange.phase(instruction)

    def _receive_forward(self, step: _Step, instruction: Instruction) -> None:
        self._receive(step, instruction, None)

    def _receive_backward(self, step: _Step, instruction: Instruction) -> None:
        self._receive(step, instruction, step.metas[instruction.unit.stage])

    def _send_forward(self, step: _Step, instruction: Instruction) -> None:
        self._send(step, instruction, instruction.unit.stage + 1)

    def _send_backward(self, step: _Step, instruction: Instruction) -> None:
        self._send(step, instruction, instruction.unit.stage - 1)

    # Messages --------------------------------------------------------------------------------------------------------

    def _receive(self, step: _Step, instruction: Instruction, meta: TensorMeta | None) -> None:
        assert self._transport is not None and instruction.peer is not None
        channel = instruction.channel(self._rank)
        with self._messaging(step, instruction, channel.source):
            receive = self._transport.receive(channel, instruction.unit.stage, meta)
        step.received[instruction.op, instruction.unit] = channel, receive
        self._measure_messages(step)

    def _take(self, step: _Step, op: Op, instruction: Instruction) -> torch.Tensor:
        """The tensor that enters a unit: received, or made by the neighbouring stage on this rank."""
        unit = instruction.unit
        if (op, unit) not in step.received:
            offset, made = (-1, Op.SEND_FORWARD) if op is Op.RECEIVE_FORWARD else (1, Op.SEND_BACKWARD)
            return step.made.pop((made, unit._replace(stage=unit.stage + offset)))
        channel, receive = step.received.pop((op, unit))
        assert self._transport is not None
        with self._messaging(step, instruction, channel.source):
            tensor = self._transport.wait(channel, receive)
        step.num_bytes = tensor.nbytes
        return tensor

    def _send(self, step: _Step, instruction: Instruction, stream: int) -> None:
        assert self._transport is not None and instruction.peer is not None
        tensor = step.made.pop((instruction.op, instruction.unit))
        step.num_bytes = tensor.nbytes
        with self._messaging(step, instruction, instruction.peer):
            channel = instruction.channel(self._rank)
            self._transport.send(channel, stream, tensor, announce=channel.direction == "forward")
            self._measure_messages(step)
            self._transport.reap()

    @contextmanager
    def _messaging(self, step: _Step, instruction: Instruction, peer: int) -> Iterator[None]:
        """Count the time as waiting, and say whose message failed."""
        try:
            with step.recorder.waiting() if step.recorder else nullcontext():
                yield
        except torch.OutOfMemoryError:  # a RuntimeError, too, but nobody else's fault
            raise
        except RuntimeError as error:
            raise lost_rank(self._rank, peer, error, where=f" at {instruction}") from error

    # Measures --------------------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        record, stages = self.record, self._stages.values()
        record.peak_live_units = max(record.peak_live_units, sum(stage.num_live for stage in stages))
        if self._meter is not None:
            self._meter.read()
            record.peak_kv_bytes = max(record.peak_kv_bytes, self.kv_bytes)
            record.peak_carry_bytes = max(record.peak_carry_bytes, sum(stage.carry_bytes for stage in stages))
            record.peak_held_bytes = max(record.peak_held_bytes, self.held_bytes)

    def _measure_messages(self, step: _Step) -> None:
        if self._meter is None:
            return
        assert self._transport is not None
        record = self.record
        for direction in ("forward", "backward"):
            posted = sum(channel.direction == direction for channel, _ in step.received.values())
            record.peak_receives = max(record.peak_receives, posted)
        record.peak_sends = max(record.peak_sends, self._transport.num_unfinished_sends)
        num_bytes = self._transport.send_bytes + sum(receive.num_bytes for _, receive in step.received.values())
        record.peak_message_bytes = max(record.peak_message_bytes, num_bytes)

    def _drop(self) -> None:
        for stage in self._stages.values():
            stage.drop()
        self._buffers.clear()
        if self._transport is not None:
            self._transport.drop()
        for part in (self._exchange, self._vocabulary):
            if part is not None:
                part.drop()


def _plan_together(program: Program, stages: dict[int, Stage]) -> dict[int, SlotPlan]:
    """The slot plan of each stage. Stages with equally many attention layers share slots, layer by layer."""
    by_layers: dict[int, list[int]] = {}
    for index, stage in stages.items():
        by_layers.setdefault(len(stage.attention), []).append(index)
    plans = [(indices, plan_slots(program, indices)) for indices in by_layers.values()]
    return {index: plan for indices, plan in plans for index in indices}
