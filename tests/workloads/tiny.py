"""Workloads of milliseconds a step, clean or with one fault: `object = "tiny.py:NAME"`.

All are the same model over 257 byte ids: embedding, mix, running mean over the tokens so
far (`pool`), head. NAME is `clean` or the fault it carries. Faults count calls on the
model itself, so two lanes of one process meet them at the same step.
"""

import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 32
VOCAB = 257
OFFSET = 2.2
"""Mean of what is pooled: a bf16 running sum above 64 takes 2.0 for each of them."""
SPREAD = 0.03
"""Standard deviation of what is pooled."""
GAIN = 8.0
"""Weight of the pooled features in the logits, so that their error is seen in the loss."""
FAULT_CALL = 3
"""The call, from 1, in which a training fault strikes."""
KEPT_BYTES = 64 << 20
"""What `keeps_logits` holds back in each eval batch; above the noise of a CPU's reading."""
SLOW_SECONDS = 0.5
CUDA_OOM_TEXT = "CUDA out of memory. Tried to allocate 31.30 GiB."


class Mean(nn.Module):
    """Mean over all tokens so far, summed in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return (x.float().cumsum(1) / counts).to(x.dtype)


class NarrowMean(nn.Module):
    """The same, summed in the dtype that comes: bf16 in the bf16 lane."""

    def forward(self, x: Tensor) -> Tensor:
        total, means = torch.zeros_like(x[:, 0]), []
        for position in range(x.shape[1]):
            total = total + x[:, position]
            means.append(total / (position + 1))
        return torch.stack(means, dim=1)


class TinyModel(nn.Module):
    """Logits of the next id, fp32 [B, L, V]."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.pool = pool
        self.head = nn.Linear(WIDTH, VOCAB)
        nn.init.constant_(self.mix.bias, OFFSET)
        # A wide spread of addends would dither the rounding of their sum, and heal it.
        nn.init.normal_(self.mix.weight, std=SPREAD / WIDTH**0.5)
        self.train_calls = 0
        self.eval_calls = 0
        self.kept: list[Tensor] = []

    def forward(self, ids: Tensor) -> Tensor:
        mixed = self.mix(self.embed(ids))
        logits: Tensor = self.head(mixed + GAIN * (self.pool(mixed) - OFFSET))
        return logits.float()


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyWorkload:
    """One variant; `name` is its fault, or `clean`."""

    name: str
    vocab_size: int = VOCAB

    def build(self) -> nn.Module:
        model = TinyModel(NarrowMean() if self.name == "faulty_mean" else Mean())
        return model.to(torch.bfloat16) if self.name == "bf16_weights" else model

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        assert isinstance(model, TinyModel)
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return self._train(model, loss) if model.training else self._eval(model, loss, logits)

    def _train(self, model: TinyModel, loss: Tensor) -> Tensor:
        model.train_calls += 1
        if self.name == "slow_first_step" and model.train_calls == 1:
            time.sleep(SLOW_SECONDS)
        if model.train_calls != FAULT_CALL:
            return loss
        if self.name == "oom_in_train":
            raise torch.OutOfMemoryError(CUDA_OOM_TEXT)
        if self.name == "crash_in_train":
            raise ZeroDivisionError("a fault of the workload's own")
        return loss * float("nan") if self.name == "nan_loss" else loss

    def _eval(self, model: TinyModel, loss: Tensor, logits: Tensor) -> Tensor:
        model.eval_calls += 1
        if self.name == "oom_in_eval":
            raise torch.OutOfMemoryError(CUDA_OOM_TEXT)
        if self.name == "host_oom_in_eval":
            torch.empty(1 << 60, dtype=torch.uint8)  # more than any machine has
        if self.name == "keeps_logits":
            copies = KEPT_BYTES // (logits.numel() * logits.element_size())
            model.kept.append(logits.repeat(copies, 1, 1))
        return loss

    def compile(self, model: nn.Module) -> None:
        """Leave it eager: compiling costs more than all its steps."""


clean = TinyWorkload(name="clean")
oom_in_train = TinyWorkload(name="oom_in_train")
oom_in_eval = TinyWorkload(name="oom_in_eval")
host_oom_in_eval = TinyWorkload(name="host_oom_in_eval")
keeps_logits = TinyWorkload(name="keeps_logits")
nan_loss = TinyWorkload(name="nan_loss")
bf16_weights = TinyWorkload(name="bf16_weights")
faulty_mean = TinyWorkload(name="faulty_mean")
slow_first_step = TinyWorkload(name="slow_first_step")
crash_in_train = TinyWorkload(name="crash_in_train")
