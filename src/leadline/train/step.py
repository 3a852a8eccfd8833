"""One optimiser step, the same for the twin, the sweep and training.

AdamW with fp32 state, gradients clipped by their global norm, learning rate warmed
up linearly. No loss scaling: bf16 has fp32's range, so the norm that is clipped and
reported is the true one.
"""

import torch
from torch import Tensor, nn

from leadline.core.schedule import Schedule
from leadline.models.workload import Workload
from leadline.train.precision import Precision, exact_fp32_products, precision_context
from leadline.train.settings import StepSettings


class TrainStep:
    """A model with its optimiser, in one precision, on one device."""

    def __init__(
        self,
        workload: Workload,
        *,
        device: torch.device,
        precision: Precision,
        settings: StepSettings,
        seed: int,
    ) -> None:
        """Build the model under *seed* and, on CUDA, compile it."""
        self.workload = workload
        self.device = device
        self.precision = precision
        self.settings = settings
        torch.manual_seed(seed)
        with torch.device(device):
            self.model = workload.build()
        self.model.train()
        self.optimizer = build_optimizer(self.model, settings)
        self.schedule = Schedule(peak=settings.learning_rate, warmup_steps=settings.warmup_steps)
        self.steps_done = 0
        if device.type == "cuda":
            workload.compile(self.model)

    def __call__(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Take one step on int64 [B, L] batches already on the device.

        Returns the loss and the gradient norm before clipping, both fp32 0-d and still on
        the device: reading them is the caller's decision, because it waits.
        """
        rate = self.schedule.rate(self.steps_done + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with precision_context(self.precision, self.device.type):
            loss = self.workload.loss(self.model, inputs, targets)
        with exact_fp32_products():  # autocast is for the forward only
            loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps_done += 1
        return loss.detach().float(), norm.detach().float()

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Loss of a held-out batch, fp32 0-d on the device; keeps nothing."""
        self.model.eval()
        try:
            with precision_context(self.precision, self.device.type):
                return self.workload.loss(self.model, inputs, targets).float()
        finally:
            self.model.train()


def build_optimizer(model: nn.Module, settings: StepSettings) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; matrices decay, vectors and embeddings do not."""
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for weight in model.parameters():
        if weight.requires_grad:
            decays = weight.ndim >= 2 and id(weight) not in embeddings
            (matrices if decays else others).append(weight)
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        fused=True,
    )
