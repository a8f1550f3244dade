"""Few-step flows by consistency distillation within phases (FlashVDM, section 3: progressive flow distillation).

The path of the flow is cut into phases. The student learns to jump from any time of a phase to its end: its jump from
t equals an averaged student's jump from t + step, where the teacher's Euler step leads to. With as many phases as steps
it samples the teacher's own path, with no noise added between. The paper goes on to fewer phases, distils guidance
before and trains against a discriminator after; there is no condition to guide here, and the others are left out. The
Huber loss, the averaged target and the first weights from the teacher are the paper's; their constants are guesses.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal_lab.other_fields import Options
from shoal_lab.other_fields._flow import FlowTransformer
from shoal_lab.other_fields._trained import Fit, trained


def jump(model: FlowTransformer, x: Tensor, time: Tensor, end: Tensor) -> Tensor:
    """Where tokens [n, tokens, channels] at times [n] are at the ends [n], along one straight line."""
    return x + (end - time)[:, None, None] * model(x, time)  # type: ignore[no-any-return]


def loss(student: FlowTransformer, target: FlowTransformer, teacher: FlowTransformer, data: Tensor, phases: int,
         fine: int) -> Tensor:
    """How far jumps from neighbouring times of one of the teacher's paths part.

    Args:
        data: latents [n, tokens, channels].
        phases: of the path.
        fine: Euler steps of the teacher in each phase.
    """
    at = torch.randint(phases * fine, (len(data),))
    time, later, end = at / (phases * fine), (at + 1) / (phases * fine), (at // fine + 1) / phases
    with torch.no_grad():
        x = torch.lerp(torch.randn_like(data), data, time[:, None, None])
        moved = jump(teacher, x, time, later)
        wanted = jump(target, moved, later, end)  # At the end of a phase this is `moved` itself.
    # The jump over the length of the phase: near its end a jump is short and would teach little.
    scale = (end - time)[:, None, None]
    return F.huber_loss((jump(student, x, time, end) - x) / scale, (wanted - x) / scale, delta=1.0)


def distil(options: Options, teacher: FlowTransformer, data: Tensor, phases: int, fit: Fit, batch: int = 64,
           fine: int = 10) -> tuple[FlowTransformer, float]:
    """A student that samples in `phases` steps, and the seconds that it took.

    Raises:
        ValueError: There is no phase.
    """
    if phases < 1:
        raise ValueError(f"phases {phases}; it must be 1 or more")
    student, target = copy.deepcopy(teacher), copy.deepcopy(teacher).requires_grad_(False)
    teacher.requires_grad_(False)

    def step(_: int) -> Tensor:
        return loss(student, target, teacher, data[torch.randint(len(data), (batch,))], phases, fine)

    seconds = trained(options, f"flashvdm-student-{options.seed}", student, fit, step, target)
    return student, seconds
