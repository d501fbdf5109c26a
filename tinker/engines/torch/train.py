"""Updates: per policy a trainable adapter, a gradient that accumulates, and an AdamW of its own.

All of a policy's weights lie in one flat tensor, and so do its gradient and its optimizer state; the adapter's matrices are views into
it. So policies share nothing but the frozen base, and clipping, checking and stepping take one operation each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from tinker.algorithms.losses import Loss
from tinker.engines.checks import check_lora, check_numbers, check_rows, loss_named, moves, not_attached
from tinker.engines.engine import EngineError, Files
from tinker.engines.states import opened, sealed
from tinker.engines.torch.adapters import adapter_files, read_adapter
from tinker.engines.torch.lora import Adapter, One, Site, fresh
from tinker.engines.torch.model import Model
from tinker.engines.torch.scoring import cut_rows, pick
from tinker.protocol.batches import Row
from tinker.protocol.values import AdamSpec, LoraSpec, LossSpec, PolicyName

MEANS = ("entropy", "ratio_mean", "clip_fraction")
PROBED = 2  # rows of a micro-batch whose KL to the base is measured when the loss has no KL term


class Policy:
    """The weights, gradient and optimizer of one policy."""

    def __init__(self, lora: LoraSpec, sites: Sequence[Site], device: torch.device) -> None:
        self.lora = lora
        values = fresh(lora.rank, lora.alpha, [site.leaf in lora.targets for site in sites], sites, lora.seed)
        pieces = [tensor for pair in values if pair is not None for tensor in pair]
        self.weights = nn.Parameter(torch.cat([piece.reshape(-1) for piece in pieces]).to(device))
        self.gradient = self.weights.grad = torch.zeros_like(self.weights)
        self.accumulated = False
        views = iter(self._views([tuple(piece.shape) for piece in pieces]))
        pairs = [(next(views), next(views)) if pair is not None else (None, None) for pair in values]
        self.adapter = Adapter(lora.rank, lora.alpha, tuple(down for down, _ in pairs), tuple(up for _, up in pairs))
        self._optimizer = torch.optim.AdamW([self.weights], lr=0.0)

    def step(self, adam: AdamSpec) -> dict[str, float]:
        """Clip and apply the gradient. Without one (or with exactly zero) nothing moves, not even by momentum."""
        norm = float(self.gradient.norm())
        if not self.accumulated or norm == 0.0:
            self.drop()
            return {"grad_norm": 0.0, "stepped": 0.0}
        if not np.isfinite(norm):
            self.drop()
            raise EngineError(
                "the accumulated gradient overflowed and was dropped; lower the advantages or the number of batches per step"
            )
        if adam.clip > 0.0:
            self.gradient.mul_(min(1.0, adam.clip / (norm + 1e-6)))
        self._optimizer.param_groups[0].update(
            lr=adam.lr, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay
        )
        self._optimizer.step()
        self.drop()
        return {"grad_norm": norm, "stepped": 1.0}

    def rewind(self, adapter: Adapter) -> None:
        """Take these weights, of the same shape, and begin with a new gradient and optimizer."""
        pairs = zip(adapter.down, adapter.up, strict=True)
        pieces = [piece.reshape(-1) for pair in pairs for piece in pair if piece is not None]
        flat = torch.cat(pieces)
        if flat.shape != self.weights.shape:
            raise EngineError(
                f"the adapter has {flat.numel()} weights, the policy {self.weights.numel()}: rewind it to one that it published"
            )
        self.weights.data.copy_(flat)
        self.drop()
        self._optimizer = torch.optim.AdamW([self.weights], lr=0.0)

    def tensors(self) -> dict[str, Tensor]:
        """What `restore` needs: the weights and, after the first step, what the optimizer remembers."""
        return {"weights": self.weights.detach(), **self._optimizer.state.get(self.weights, {})}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from these tensors, without a gradient. EngineError, and nothing has changed, if they do not fit."""
        shapes = {name: tuple(each.shape) for name, each in tensors.items()}
        flat = tuple(self.weights.shape)
        memory = {"step": (), "exp_avg": flat, "exp_avg_sq": flat}
        if shapes not in ({"weights": flat}, {"weights": flat, **memory}):
            raise EngineError(
                f"the state's tensors are {shapes}; this adapter needs weights of {flat}, alone or with {memory}: "
                "it belongs to another model or adapter"
            )
        self.weights.data.copy_(tensors["weights"])
        self.drop()
        self._optimizer = torch.optim.AdamW([self.weights], lr=0.0)
        if len(tensors) > 1:
            moments = {name: tensors[name].to(self.weights.device, copy=True) for name in ("exp_avg", "exp_avg_sq")}
            self._optimizer.state[self.weights] = {"step": tensors["step"].clone(), **moments}

    def drop(self) -> None:
        """Forget the accumulated gradient."""
        self.gradient.zero_()
        self.accumulated = False

    def _views(self, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Leaves that share memory with `weights`, and whose gradients share memory with `gradient`."""
        views, begin = [], 0
        for shape in shapes:
            end = begin + int(np.prod(shape))
            leaf = self.weights.detach()[begin:end].view(shape).requires_grad_()
            leaf.grad = self.gradient[begin:end].view(shape)
            views.append(leaf)
            begin = end
        return views


class Trainer:
    """The policies that are trained here, on one base model, in micro-batches of at most `padded` tokens."""

    def __init__(self, model: Model, padded: int) -> None:
        self._model = model
        self._padded = padded
        self._policies: dict[PolicyName, Policy] = {}

    def attach(self, policy: PolicyName, lora: LoraSpec) -> dict[str, bytes]:
        check_lora(policy, lora, self._model.card)
        if policy in self._policies:
            raise EngineError(f"policy {policy} is attached already: detach it first, or give the new one another name")
        self._policies[policy] = Policy(lora, self._model.router.sites, self._model.device)
        return self.publish(policy)

    def detach(self, policy: PolicyName) -> None:
        self._policies.pop(policy, None)

    def rewind(self, policy: PolicyName, adapter: Files) -> None:
        trained, sites = self._find(policy), self._model.router.sites
        trained.rewind(read_adapter(adapter, sites, self._model.card.name))

    def save_state(self, policy: PolicyName) -> Files:
        trained = self._find(policy)
        return sealed("torch", self._model.card, asdict(trained.lora), save(trained.tensors()))

    def load_state(self, policy: PolicyName, state: Files) -> None:
        card = self._model.card
        facts, tensors = opened(state, "torch", card)
        try:
            lora = LoraSpec(**{**facts, "targets": tuple(facts["targets"])})
            loaded = load(tensors)
        except Exception as reason:
            raise EngineError(f"the state of {policy} cannot be read ({reason}): use an older checkpoint") from reason
        check_lora(policy, lora, card)
        fresh_one = Policy(lora, self._model.router.sites, self._model.device)
        fresh_one.restore(loaded)
        self._policies[policy] = fresh_one

    def publish(self, policy: PolicyName) -> dict[str, bytes]:
        return adapter_files(self._find(policy).adapter, self._model.router.sites, self._model.card.name)

    def optim_step(self, policy: PolicyName, adam: AdamSpec) -> dict[str, float]:
        return self._find(policy).step(adam)

    def forward_backward(self, policy: PolicyName, rows: Sequence[Row], spec: LossSpec) -> dict[str, float]:
        """Add the gradient of these rows. Rows in which no token can have one are left out (the gradient stays exact)."""
        trained = self._find(policy)
        loss = loss_named(spec)
        check_rows(rows, self._model.card)
        check_numbers(rows)
        useful = [row for row in rows if moves(row, loss, spec)]
        tally = Tally(tokens=sum(int(row.mask.sum()) for row in rows), skipped=len(rows) - len(useful))
        for batch in cut_rows(useful, self._model.card.vocab, self._padded):
            self._micro_batch(trained, [useful[number] for number in batch], loss, spec, tally)
        if useful:
            if not bool(torch.isfinite(trained.gradient).all()):
                trained.drop()
                raise EngineError(
                    f"the gradient of {policy} is not finite and was dropped; loss was {tally.loss}, look at its advantages"
                )
            trained.accumulated = True
        return tally.metrics()

    def _micro_batch(self, trained: Policy, rows: Sequence[Row], loss: Loss, spec: LossSpec, tally: Tally) -> None:
        chosen = [np.flatnonzero(row.mask) for row in rows]
        picked = pick(rows, chosen, tempered=loss.tempered)
        device = self._model.device
        old, advantages, weights = (
            torch.from_numpy(np.concatenate([row[at] for row, at in zip(column, chosen, strict=True)])).to(device)
            for column in zip(*((row.logprobs, row.advantages, row.weights) for row in rows), strict=True)
        )
        everywhere = torch.log_softmax(picked.logits(self._model, One(trained.adapter)), dim=-1)
        new = everywhere.gather(1, picked.tokens[:, None].to(device)).squeeze(1)
        total, sums = loss.terms(new, old, advantages, weights, spec)
        sums = dict(sums)
        with torch.set_grad_enabled(spec.entropy != 0.0):
            entropy = -(everywhere.exp() * everywhere).sum(-1)
        sums["entropy"] = entropy.detach().sum()
        if spec.entropy != 0.0:
            total = total - spec.entropy * (weights * entropy).sum()
        probed = len(rows) if spec.kl != 0.0 else min(PROBED, len(rows))
        with torch.no_grad():
            beside = picked if probed == len(rows) else pick(rows[:probed], chosen[:probed], tempered=loss.tempered)
            reference = torch.log_softmax(beside.logits(self._model, None), dim=-1)
        with torch.set_grad_enabled(spec.kl != 0.0):
            policy = everywhere[: len(reference)]
            kl = (policy.exp() * (policy - reference)).sum(-1)
        tally.add_kl(kl.detach())
        if spec.kl != 0.0:
            total = total + spec.kl * (weights * kl).sum()
        total.backward()  # type: ignore[no-untyped-call]
        tally.add(total, sums, new.detach(), old if loss.by_advantage else None)

    def _find(self, policy: PolicyName) -> Policy:
        if policy not in self._policies:
            raise not_attached(self._policies, policy)
        return self._policies[policy]


@dataclass(slots=True)
class Tally:
    """What a `forward_backward` reports, summed over its micro-batches. `tokens` counts all trained tokens, means are over the computed."""

    tokens: int
    skipped: int
    loss: float = 0.0
    computed: int = 0
    missing: int = 0
    gap: float = 0.0
    sums: dict[str, float] | None = None
    kl: float = 0.0
    kl_tokens: int = 0

    def add_kl(self, kl: Tensor) -> None:
        """KL to the base at some of the tokens (at all of them, if the loss has a KL term)."""
        self.kl += float(kl.sum())
        self.kl_tokens += len(kl)

    def add(self, loss: Tensor, sums: dict[str, Tensor], new: Tensor, old: Tensor | None) -> None:
        """`old` None: the rows were not sampled, there is nothing to compare with."""
        self.loss += float(loss.detach())
        self.computed += len(new)
        totals = self.sums = self.sums or {}
        for name, value in sums.items():
            totals[name] = totals.get(name, 0.0) + float(value)
        if old is not None:
            known = old.isfinite()
            self.missing += len(old) - int(known.sum())
            self.gap = max(self.gap, float((new - old).abs().where(known, new.new_zeros(())).max()))

    def metrics(self) -> dict[str, float]:
        """Sums over tokens become means; the documented names are always there."""
        sums = dict.fromkeys(MEANS, 0.0) | (self.sums or {})
        means = {name: value / max(1, self.computed) for name, value in sums.items()}
        return means | {
            "loss": self.loss,
            "kl": self.kl / max(1, self.kl_tokens),
            "tokens": float(self.tokens),
            "logprob_gap_max": self.gap,
            "logprobs_missing": float(self.missing),
            "rows_skipped": float(self.skipped),
        }
