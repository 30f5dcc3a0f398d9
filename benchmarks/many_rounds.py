"""What R costs: allocated memory by recompute policy, and the precision of gradients. On the CPU.

python -m benchmarks.many_rounds memory
python -m benchmarks.many_rounds precision
"""

from __future__ import annotations

import argparse
import copy
import platform
from unittest.mock import patch

import torch

from deeploop_model import DeepLoopConfig, DeepLoopModel
from deeploop_model.recompute import POLICIES
from deeploop_model.visit_gradients import VisitPass
from tests.support.allocation import allocated

ROUNDS = (1, 8, 16, 32, 64)


def memory() -> None:
    """Bytes as hidden states of B*T*d 16-bit numbers: kept between the passes / at most at once."""
    print("| recompute | " + " | ".join(f"R = {rounds}" for rounds in ROUNDS[:-1]) + " | one more round keeps |")
    print("|---" * (len(ROUNDS) + 1) + "|")
    tokens = torch.zeros(4, 128, dtype=torch.int64)
    state = tokens.numel() * 128 * 2
    for policy in (*POLICIES, "segment:8"):
        config = DeepLoopConfig(
            num_blocks=2, num_rounds=8, d_model=128, num_heads=4, vocab_size=512, context_length=128
        )
        model = DeepLoopModel(config, recompute=policy).bfloat16()
        model(tokens, tokens).loss.backward()
        found = [allocated(lambda m=model, r=r: m(tokens, tokens, num_rounds=r).loss.backward) for r in ROUNDS[:-1]]  # type: ignore[misc]
        cells = [f"{each.kept / state:.1f} / {each.peak / state:.1f}" for each in found]
        growth = (found[-1].kept - found[-2].kept) / (ROUNDS[-2] - ROUNDS[-3]) / state
        print(f"| {policy} | " + " | ".join(cells) + f" | {growth:.2f} |", flush=True)


def precision() -> None:
    """Relative error of a block's gradient to float64: K = 1, width 64, bf16 weights."""
    print("| sum over visits | " + " | ".join(f"R = {rounds}" for rounds in ROUNDS) + " |")
    print("|---" * (len(ROUNDS) + 1) + "|")
    for name in ("autograd, bf16", "float32"):
        errors = [gradient_error(rounds, by_autograd=name != "float32") for rounds in ROUNDS]
        print(f"| {name} | " + " | ".join(f"{error:.4f}" for error in errors) + " |", flush=True)


def gradient_error(rounds: int, *, by_autograd: bool) -> float:
    config = DeepLoopConfig(num_blocks=1, num_rounds=rounds, d_model=64, num_heads=4, vocab_size=500, context_length=64)
    low = DeepLoopModel(config, seed=3).bfloat16()
    exact = copy.deepcopy(low).double()
    batch = torch.randint(0, 500, (4, 65), generator=torch.Generator().manual_seed(0))
    exact(batch[:, :-1], batch[:, 1:]).loss.backward()
    if by_autograd:
        with patch.object(VisitPass, "begin", lambda *args, **options: None):
            low(batch[:, :-1], batch[:, 1:]).loss.backward()
    else:
        low(batch[:, :-1], batch[:, 1:]).loss.backward()
    found, expected = (
        torch.cat([weight.grad.double().flatten() for weight in model.blocks.parameters() if weight.grad is not None])
        for model in (low, exact)
    )
    return float((found - expected).norm() / expected.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory and gradient precision against the number of rounds.")
    parser.add_argument("question", choices=["memory", "precision"])
    question = parser.parse_args().question
    print(f"{platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}")
    {"memory": memory, "precision": precision}[question]()


if __name__ == "__main__":
    main()
