"""A model that learns under FSDP2: one optimizer step on a mini-batch, in micro-batches whose gradients add up.

The trained parameters are float32. With `dtype=bfloat16` the forward pass runs under autocast, and weights for the
engine or for disk in Hugging Face format are cast to bfloat16.
"""

from __future__ import annotations

import json
import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agentrl.checkpoint.state import StateWriterFactory, checksums
from agentrl.config.registries import CHECKPOINT_WRITERS
from agentrl.errors import CheckpointError, ConfigError
from agentrl.model.compiled import compile_layers, text_layers
from agentrl.model.heads import PolicyModel, ScoreModel, ValueModel
from agentrl.model.packed import shares_beginnings
from agentrl.model.scores import Compare, Needs
from agentrl.model.sharded_load import read_weights
from agentrl.optim.optimizer import Optim
from agentrl.parallel.collectives import all_max, all_names, local, rank
from agentrl.parallel.gradients import add_up, clip, total_norm
from agentrl.parallel.mesh import Mesh
from agentrl.parallel.offload import Offload, give_back, offloading
from agentrl.parallel.shard import decoder_layers, shard
from agentrl.system.json_value import JSON
from agentrl.system.publish import flush_to_disk
from agentrl.trajectory.batch import RaggedBatch, Sequences
from agentrl.workers.backend import MiniBatch, Settings, StepReport
from agentrl.workers.forward import filler, to_device
from agentrl.workers.passes import Part, Pass
from agentrl.workers.plan import micro_batches, rank_shares

logger = logging.getLogger(__name__)
Found = TypeVar("Found")
CHECKSUMS = "checksums.json"
"""File of a checkpoint with the checksums of its tensors, whoever wrote them."""


class Learner(Generic[Found]):
    """A module that learns, sharded by FSDP2, and its optimizer: shared by the backends of policies and critics."""

    def __init__(self, root: PolicyModel | ValueModel | ScoreModel, settings: Settings, mesh: Mesh) -> None:
        """Shard `root` in place, and read its weights where it has not read any. Raises ConfigError."""
        base = root.base
        matrices = _matrix_names(root)
        layers = text_layers(base)
        recomputed = settings.model.recomputed(len(layers))
        if recomputed:
            checkpoint_layers(base, layers[recomputed:], offload=settings.model.enable_activation_offload)
        self._keep_all = len(layers) - recomputed if base.supports_gradient_checkpointing else 0
        """Layers that keep all their activations for the backward pass, and could be computed again in place of it."""
        self._base = base
        partial = shard(root, base, mesh, autocast=root.autocast)
        read_weights(root, base)
        if settings.use_torch_compile:
            compile_layers(layers, base.device)
        self.mesh = mesh
        self.device = torch.device(settings.device)
        self.tensors = {_hugging_face_name(name): p for name, p in root.named_parameters()}
        """All parameters; `params` are the trained ones."""
        self.params = {name: p for name, p in self.tensors.items() if p.requires_grad}
        home = torch.device("cpu") if settings.param_offload else None
        self.optim = Optim(self.params, matrices, settings.optim, settings.total_steps, home)
        self._partial = [param for name, param in self.params.items() if name in partial]
        self._grad_clip = settings.grad_clip
        self.max_tokens = settings.max_tokens * mesh.parallel.sequence
        """Tokens of a micro-batch, at most."""
        self.offload = Offload(root, self.device, enabled=settings.param_offload)
        make_state = cast(StateWriterFactory, CHECKPOINT_WRITERS.get(settings.checkpoint_writer))
        self.state = make_state(self.params, self.optim)
        self._root = root
        self._kept: list[torch.Tensor] = []
        self._saved: Mapping[str, int] = {}
        """Checksums of the checkpoint that was loaded, until `not_restored` has read them."""
        self._unwritten: tuple[Path, Mapping[str, int]] | None = None
        """Folder and checksums of a save whose other files are still being written."""

    @abstractmethod
    def forward(
        self, micro: RaggedBatch, needs: Needs, compare: Compare | None = None, needed: torch.Tensor | None = None
    ) -> Found:
        """Run the model on a micro-batch that is on its device, with gradient where it is enabled.

        needed [T] bool: the tokens whose log-probs are read; None: the mask.
        """

    @property
    def shared_on(self) -> torch.device | None:
        """Return this rank's device, where the model computes common beginnings of sequences once there."""
        return self.device if shares_beginnings(self._base) else None

    @property
    def is_whole(self) -> bool:
        """Say whether this rank has all of the model, as transformers' own has it."""
        mesh = self.mesh
        return mesh.fsdp is None and mesh.tensor is None and mesh.sequence is None

    def mark(self) -> Mapping[str, JSON]:
        """Return the fields without which a checkpoint of the trained parameters alone has no meaning (see
        `StateWriter.save`)."""
        return {}

    def on_device(self) -> AbstractContextManager[None]:
        return self.offload

    at_work = on_device

    def keep(self) -> None:
        self._kept = self._copied()

    @contextmanager
    def kept(self) -> Iterator[None]:
        with self.offload:
            present = self._copied()
            self._put(self._kept)
            try:
                yield
            finally:
                self._put(present)

    def _copied(self) -> list[torch.Tensor]:
        """Copy this rank's part of the parameters that learn to host memory."""
        with self.offload:
            return [local(param.detach()).to("cpu", copy=True) for param in self.params.values()]

    @torch.no_grad()
    def _put(self, parts: list[torch.Tensor]) -> None:
        """Set this rank's part of the trained parameters; gathered parts of others are forgotten."""
        if isinstance(self._root, FSDPModule):
            self._root.reshard()
        for param, part in zip(self.params.values(), parts, strict=True):
            local(param.detach()).copy_(part)

    def share_of(self, sequences: Sequences) -> RaggedBatch:
        return sequences.select(rank_shares(sequences, self.mesh.data, self.shared_on)[self.mesh.data_rank]).load()

    def sum(self, values: torch.Tensor) -> list[float]:
        found: list[float] = self.mesh.sum(values.to(self.device)).tolist()
        return found

    def micro_batches(self, mine: RaggedBatch) -> list[list[int]]:
        """Plan the forward passes over this rank's share of a mini-batch: indices of its sequences, each once.

        A strategy of yours may pack otherwise. Ranks may differ in the number of passes.
        """
        return micro_batches(mine, self.max_tokens, self.shared_on)

    def step(self, mini: MiniBatch[Found], step: float) -> StepReport:
        with self.offload:
            self.optim.zero_grad()
            done: list[Callable[[], None]] = []
            sums = self._accumulate(self.share_of(mini.sequences), mini, done)
            if mini.beside is not None:
                more = self._accumulate(self.share_of(mini.beside.sequences), mini.beside, done)
                sums |= more | {"loss": sums["loss"] + more["loss"]}
            if self.mesh.tensor is not None:
                add_up(self._partial, self.mesh.tensor.get_group())
            norm = total_norm(self.params.values())
            grad_norm, lr = norm.item(), 0.0
            if math.isfinite(grad_norm) and math.isfinite(sums["loss"]):
                clip(self.params.values(), self._grad_clip, norm)
                for one in mini.watches:
                    one.stepping(self, grad_norm, step)
                lr = self.optim.step(step)
                for one in mini.watches:
                    one.stepped(self, step)
            self.optim.zero_grad()
            return StepReport(sums, grad_norm, lr)

    def save(self, dir: Path, *, background: bool) -> list[str]:
        with self.offload:
            sums = self._checksums()
            files = self.state.save(dir, self.mark(), background=background)
        if rank() > 0:
            return files
        self._unwritten = dir, sums
        if not background:
            self.finish_save(wait=True)
        return [*files, CHECKSUMS]

    def finish_save(self, *, wait: bool) -> bool:
        unwritten, self._unwritten = self._unwritten, None
        done = self.state.finish(wait=wait)  # an error of the other files ends the save
        if unwritten is not None and done:
            dir, sums = unwritten
            dir.mkdir(parents=True, exist_ok=True)
            (dir / CHECKSUMS).write_text(json.dumps(sums, indent=1) + "\n", encoding="utf-8")
            flush_to_disk(dir / CHECKSUMS)
        elif not done:
            self._unwritten = unwritten
        return done

    def load(self, dir: Path) -> None:
        self._saved = read_checksums(dir / CHECKSUMS)
        with self.offload:
            self.state.load(dir, self.mark())

    def not_restored(self) -> list[str]:
        saved, self._saved = self._saved, {}
        if not saved:
            return []
        found = self._checksums()
        return sorted(name for name in saved.keys() | found.keys() if saved.get(name) != found.get(name))

    def _checksums(self) -> dict[str, int]:
        """Compute the checksums of the parameters that learn, and of the optimizer's state."""
        return checksums({**self.params, **self.optim.state()})

    def make_pass(self, micro: RaggedBatch, mini: MiniBatch[Found]) -> Pass[Found]:
        """Plan the way of a micro-batch, which lies on the CPU: as one part through the whole model."""
        micro = to_device(micro, self.device)
        compare = None if mini.compare is None else mini.compare(micro)
        needed = None if mini.reads is None else mini.reads(micro)
        return Pass(micro, [Part(micro, partial(self.forward, micro, mini.needs, compare, needed))])

    def _accumulate(
        self, mine: RaggedBatch, mini: MiniBatch[Found], done: list[Callable[[], None]]
    ) -> dict[str, float]:
        """Run forward and backward over this rank's micro-batches; return the sums over all ranks, with the loss.

        Every parameter has a gradient then, 0 where no token led to it. So the step's effect on it, by momentum and
        weight decay, does not depend on which sequences were left out because their gradient is 0.

        done: the works of the optimizer step so far; these are added.
        """
        plan = self.micro_batches(mine)
        sums: dict[str, torch.Tensor] = {}
        for index in range(max(1, all_max(len(plan), self.device))):
            # FSDP gathers weights on all ranks at once: a rank with fewer micro-batches runs one without effect, and
            # so does each of them where there is no sequence at all.
            counts = index < len(plan)
            watches = mini.watches if counts else ()
            one = self.make_pass(mine.select(plan[index]) if counts else filler(mine), mini)
            if one.states is not None:
                self._do(one.states.run, one, done)
            for part in one.parts:
                self._do(part.run, one, done)
                found = part.scores()
                for watch in watches if one.states is None else ():
                    watch.scored(found, part.batch, self.mesh.averaged)
                share_of_loss, seen = mini.loss(found, part.batch)
                weight = self.mesh.averaged if counts else 0  # FSDP averages gradients; they have to add up
                (share_of_loss * weight).backward()
                self._do(part.run_back, one, done)
                for name, value in (seen | {"loss": share_of_loss.detach()}).items():
                    addend = value.double() if counts else torch.zeros((), dtype=torch.float64, device=self.device)
                    sums[name] = sums[name] + addend if name in sums else addend
            if one.states is not None:
                one.show(watches, found, self.mesh.averaged)
                self._do(one.states.run_back, one, done)
        for param in self.params.values():
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        names = all_names(sums)  # a loss may give sums for some micro-batches only
        nothing = torch.zeros((), dtype=torch.float64, device=self.device)
        totals = self.mesh.sum(torch.stack([sums.get(name, nothing) for name in names])).tolist()
        return dict(zip(names, totals, strict=True))

    def _do(self, work: Callable[[], None], of: Pass[Found], done: list[Callable[[], None]]) -> None:
        """Do a work of a pass that takes memory, and add it to the works that are done.

        Where it fails for want of memory, all layers are computed again in the backward pass from then on, where some
        had kept their activations, and all works are done again: the gradients so far may have a part of this work's.
        Ranks that work together cannot repeat what one of them has no room for. What is never repeated is not kept: a
        work holds its micro-batch.
        """
        repeats = self._keep_all > 0 and self.is_whole
        try:
            work()
        except torch.OutOfMemoryError as error:
            if not repeats:
                raise
            said = str(error).partition("\n")[0]
        else:
            if repeats:
                done.append(work)
            return
        # Only here are the frames of the error gone, and with them their tensors.
        if of.states is not None:
            of.states.forget()
        count, self._keep_all = self._keep_all, 0
        checkpoint_layers(self._base)
        logger.warning(
            "a micro-batch ran out of memory (%s) and is tried again: from now on the %s layers that kept their "
            "activations are computed again in the backward pass, too. A smaller ppo_max_token_len_per_gpu leaves more "
            "room, and enable_gradient_checkpointing=true begins so",
            said,
            count,
        )
        give_back(self.device)
        self.optim.zero_grad()
        for each in [*done, work]:
            each()
        done.clear()


def read_checksums(path: Path) -> dict[str, int]:
    """Read the checksums of a checkpoint; empty for a checkpoint of an earlier release, which has no checksums.

    Raises CheckpointError.
    """
    if not path.exists():
        return {}
    try:
        found: JSON = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: broken ({error}); delete this checkpoint") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected checksums by the names of tensors, found {found!r:.80}")
    sums = {name: value for name, value in found.items() if type(value) is int}
    if len(sums) < len(found):
        name = next(name for name in found if name not in sums)
        raise CheckpointError(f"{path}: expected a whole number for {name!r}, found {found[name]!r:.80}")
    return sums


class _Checkpoint(Protocol):
    def __call__(self, *args: object, **kwargs: object) -> object: ...


class _CheckpointingLayer(Protocol):
    """Attribute that transformers sets on layers, and does not declare."""

    _gradient_checkpointing_func: _Checkpoint


def checkpoint_layers(model: PreTrainedModel, keep_all: Collection[nn.Module] = (), *, offload: bool = False) -> None:
    """Have each decoder layer computed again in the backward pass, but layers that `keep_all` their activations.

    The rest of the model stays in eval mode: no dropout appears. offload: keep the inputs of the layers in host memory.
    Raises ConfigError for a model whose layers cannot be computed again.
    """
    if not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"enable_gradient_checkpointing: transformers cannot compute layers of {type(model).__name__} again in the "
            "backward pass; set it to false"
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    whole = {id(layer) for layer in keep_all}
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            # Only this flag, not its children's: the layer recomputes only when training.
            module.training = id(module) not in whole
            layer = cast(_CheckpointingLayer, module)
            saved = layer._gradient_checkpointing_func
            layer._gradient_checkpointing_func = in_eval_mode(module, offloading(saved) if offload else saved)


def in_eval_mode(layer: nn.Module, checkpoint: _Checkpoint) -> _Checkpoint:
    """Wrap a function that checkpoints `layer`: the layer's forward sees eval mode, as it may call dropout itself."""

    def run(forward: _Checkpoint, *args: object) -> object:
        def evaluated(*given: object) -> object:
            layer.training = False
            try:
                return forward(*given)
            finally:
                layer.training = True

        return checkpoint(evaluated, *args)

    return cast(_Checkpoint, run)


def _matrix_names(root: PolicyModel | ValueModel | ScoreModel) -> set[str]:
    """Names of the two-dimensional weights of the decoder layers, the parameters that Muon is for."""
    matrices = {id(p) for layer in decoder_layers(root.base) for p in layer.parameters() if p.ndim == 2}
    # The biases of all experts are one parameter of two dimensions.
    return {
        _hugging_face_name(name)
        for name, p in root.named_parameters()
        if id(p) in matrices and not name.endswith("bias")
    }


def _hugging_face_name(name: str) -> str:
    return name.removeprefix("base.")
